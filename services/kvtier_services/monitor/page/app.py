"""What the status page serves.

    /                 the page, with its style and scripts
    /snapshot.json    the fleet now; see `kvtier_services.monitor.snapshot`
    /events           the same again and again, as server-sent events
    /history.json     the last quarter of an hour, in few figures
    /healthz          200 as long as this process answers; for whoever asks

GET and HEAD only.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtier_services.monitor.page.access import COOKIE, Access
from kvtier_services.monitor.page.feed import MOST, Feed

FILES = {"page.html": "text/html", "page.css": "text/css"} | dict.fromkeys(
    ("page.js", "host.js", "draw.js"), "text/javascript"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
UNKNOWN = (
    "this page needs the token of status.token_file: open it once as /?token=TOKEN, or send it as "
    "'Authorization: Bearer TOKEN'\n"
)
ELSEWHERE = "this page is for this machine: open it as http://127.0.0.1 or http://localhost\n"
DAY = 86400
Endpoint = Callable[[Request], Awaitable[Response]]


def app(feed: Feed, access: Access) -> Starlette:
    """The application.

    Args:
        feed: what is shown.
        access: who may look.
    """

    def guarded(path: str, serve: Endpoint) -> Route:
        async def answer(request: Request) -> Response:
            response = _refusal(request, access) or await serve(request)
            response.headers.update(HEADERS)
            return response

        return Route(path, answer, methods=["GET"])

    async def now(_request: Request) -> Response:
        try:
            return Response(await feed.now(), media_type="application/json")
        except LookupError as exc:
            return PlainTextResponse(f"the controller does not answer: {exc}\n", 503)

    async def history(_request: Request) -> Response:
        return Response(feed.history(), media_type="application/json")

    async def events(_request: Request) -> Response:
        if feed.following >= MOST:
            return PlainTextResponse(
                f"{MOST} others follow already; /snapshot.json can be asked again and again\n", 503
            )
        return StreamingResponse(_events(feed), media_type="text/event-stream")

    async def health(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    static = [guarded("/" if name == "page.html" else f"/{name}", _file(name, kind)) for name, kind in FILES.items()]
    live = {"/snapshot.json": now, "/events": events, "/history.json": history}
    served = Starlette(routes=[*static, *itertools.starmap(guarded, live.items()), Route("/healthz", health)])
    served.router.redirect_slashes = False  # its redirects would repeat a token, and whatever Host says
    return served


def _refusal(request: Request, access: Access) -> Response | None:
    """What one who may not look, or has just shown the token, is answered."""
    if (shown := request.query_params.get("token")) is not None and access.is_token(shown):
        # The token leaves the address at once: else it would be in the browser's history, and on the screen.
        response = RedirectResponse(request.scope["path"], 303)  # of a route; `request.url` has what Host says
        secure = request.scope["scheme"] == "https"
        response.set_cookie(COOKIE, access.cookie, 30 * DAY, httponly=True, samesite="strict", secure=secure)
        return response
    verdict = access.of_request(request.headers, request.cookies)
    if verdict == "yes":
        return None
    if verdict == "elsewhere":
        return PlainTextResponse(ELSEWHERE, 421)
    return PlainTextResponse(UNKNOWN, 401, {"WWW-Authenticate": "Bearer"})


async def _events(feed: Feed) -> AsyncIterator[bytes]:
    async with aclosing(feed.follow()) as snapshots:
        async for snapshot in snapshots:
            yield b"data: " + snapshot + b"\n\n" if snapshot else b": nothing new\n\n"


def _file(name: str, kind: str) -> Endpoint:
    body = files(__package__).joinpath(name).read_bytes()

    async def serve(_request: Request) -> Response:
        return Response(body, media_type=kind)

    return serve

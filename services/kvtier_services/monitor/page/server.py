"""Where the status page listens."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from kvtier.errors import ConfigError
from kvtier_services.monitor.page.access import Access, read_token
from kvtier_services.monitor.page.app import app
from kvtier_services.monitor.page.connection import Connection
from kvtier_services.monitor.page.feed import Feed

log = logging.getLogger(__name__)

ENDING = 3.0
"""Seconds that those who look are given at the end."""
CONNECTIONS = 256
"""At a time; further ones are answered 503, and those beyond twice as many are cut off."""


class Page:
    """Serves the status page, on a thread and an event loop of its own.

    Attributes:
        url: where; empty when it could not listen.
        fault: why it could not.
    """

    def __init__(
        self, snapshot: Callable[[], Mapping[str, Any]], *, host: str, port: int, token_file: Path | None = None
    ) -> None:
        """Start serving.

        Args:
            snapshot: takes a snapshot of the fleet; called on threads of the page's.
            host: address to listen on.
            port: 0 for any free one.
            token_file: has the token that who looks must have; None for none.
        """
        self.url = self.fault = ""
        self._close: Callable[[], None] = lambda: None
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            access = Access(read_token(token_file) if token_file else b"")
            listening = _listen(host, port)
        except ConfigError as exc:
            self.fault = f"no status page: {exc}"
        except (OSError, UnicodeError) as exc:
            why = getattr(exc, "strerror", None) or exc
            self.fault = (
                f"no status page: cannot listen on {host}:{port} ({why}); set status.port to a free one, or 0, "
                "or status.host to an address of this machine"
            )
        if self.fault:
            return
        name = "localhost" if host == "localhost" else f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{listening.getsockname()[1]}/"
        self._thread = threading.Thread(
            target=self._run, args=(snapshot, access, listening), name="kvtier-page", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Serve nobody any more; idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._close()
        thread.join(2 * ENDING)

    def _run(self, snapshot: Callable[[], Mapping[str, Any]], access: Access, listening: socket.socket) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(snapshot, access, listening))
        except Exception as exc:
            log.exception("the status page has ended")
            self.url, self.fault = "", f"no status page: it has ended ({exc})"
        finally:
            listening.close()
            self._ready.set()

    async def _serve(self, snapshot: Callable[[], Mapping[str, Any]], access: Access, listening: socket.socket) -> None:
        feed = Feed(snapshot)
        config = uvicorn.Config(
            app(feed, access),
            access_log=False,  # an address may have a token in it
            log_config=None,
            log_level="warning",
            lifespan="off",
            http=Connection,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=int(ENDING),
            server_header=False,
        )
        server, loop = uvicorn.Server(config), asyncio.get_running_loop()
        polling = asyncio.create_task(feed.run())

        def close() -> None:
            server.should_exit = True
            with suppress(RuntimeError):  # it has ended by itself
                asyncio.run_coroutine_threadsafe(feed.end(), loop)

        self._close = close
        self._ready.set()
        try:
            await server.serve([listening])  # not on the main thread it leaves signals alone
        finally:
            polling.cancel()
            with suppress(asyncio.CancelledError):
                await polling


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(CONNECTIONS)
        listening.setblocking(False)  # noqa: FBT003 - the socket's own way
    except BaseException:
        listening.close()
        raise
    return listening

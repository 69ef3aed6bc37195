"""The status page: who may look, what is served, and that nobody who looks holds anybody up."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier_services.monitor.page import Page, connection, feed, server
from kvtier_services.monitor.page.access import Access, read_token
from kvtier_services.monitor.page.feed import Feed, Full, point

TOKEN = "correct-horse-battery"


class Fleet:
    """Snapshots that are counted."""

    def __init__(self) -> None:
        self.taken = 0
        self.trouble = ""
        self.hold = threading.Event()
        self.hold.set()

    def __call__(self) -> dict:
        assert self.hold.wait(30)
        self.taken += 1
        if self.trouble:
            raise OSError(self.trouble)
        return {"schema": 1, "taken": 1000.0 + 10 * self.taken, "number": self.taken, "hosts": [{"host": "a"}]}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(feed, "WATCHED", 0.02)
    monkeypatch.setattr(feed, "ALONE", 0.2)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def token_file(tmp_path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def page(fleet):
    shown = Page(fleet, host="127.0.0.1", port=0)
    yield shown
    fleet.hold.set()
    shown.close()


@pytest.fixture
def locked(fleet, token_file):
    shown = Page(fleet, host="127.0.0.1", port=0, token_file=token_file)
    yield shown
    shown.close()


def ask(page: Page, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    address = page.url.removeprefix("http://").rstrip("/")
    with contextlib.closing(http.client.HTTPConnection(address, timeout=20)) as connection:
        connection.request(method, path, headers={"Host": address} | headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


class Events:
    """One who follows, until it is closed."""

    def __init__(self, page: Page) -> None:
        self._connection = http.client.HTTPConnection(page.url.removeprefix("http://").rstrip("/"), timeout=20)
        self._connection.request("GET", "/events")
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200

    def numbers(self, many: int) -> list[int]:
        found = []
        while len(found) < many:
            line = self._answer.readline()
            assert line, "it ended"
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:])["number"])
        return found

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


@pytest.fixture
def events():
    """Makes those who follow."""
    with contextlib.ExitStack() as stack:
        yield lambda page: stack.enter_context(contextlib.closing(Events(page)))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page.css", "text/css; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
        ("/host.js", "text/javascript; charset=utf-8"),
        ("/draw.js", "text/javascript; charset=utf-8"),
        ("/snapshot.json", "application/json"),
        ("/history.json", "application/json"),
    ],
)
def test_what_is_served(page, path, kind):
    status, headers, body = ask(page, path)
    assert (status, headers["content-type"]) == (200, kind)
    assert body
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert headers["cache-control"] == "no-store"
    status, headers, body = ask(page, path, "HEAD")
    assert (status, body) == (200, b"")


def test_nothing_comes_from_elsewhere():
    folder = Path(feed.__file__).parent
    for file in ("page.html", "page.css", "page.js", "host.js", "draw.js"):
        text = (folder / file).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in "".join(line for line in text.splitlines() if not line.lstrip().startswith("//")), file
        assert "innerHTML" not in text, file


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_reads(page, method):
    assert ask(page, "/snapshot.json", method)[0] == 405


def test_the_snapshot_is_the_fleets(page, fleet):
    first = json.loads(ask(page, "/snapshot.json")[2])
    assert (first["schema"], first["hosts"]) == (1, [{"host": "a"}])
    fleet.trouble = "the head is away"
    deadline = time.monotonic() + 20
    while ask(page, "/snapshot.json")[0] == 200:
        assert time.monotonic() < deadline
    status, _, body = ask(page, "/snapshot.json")
    assert (status, body) == (503, b"the controller does not answer: the head is away\n")
    assert ask(page, "/healthz")[::2] == (200, b"ok\n"), "this process answers all the same"
    fleet.trouble = ""
    while ask(page, "/snapshot.json")[0] != 200:
        assert time.monotonic() < deadline


def test_without_a_token_only_this_machine_is_meant(page):
    port = page.url.rstrip("/").rpartition(":")[2]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "localhost", "127.8.9.1"):
        assert ask(page, "/snapshot.json", Host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "", "[::1", "0x7f.1"):
        status, _, body = ask(page, "/snapshot.json", Host=host)
        assert status == 421, host
        assert b"hosts" not in body


def test_a_token_is_asked_for(locked):
    status, headers, body = ask(locked, "/snapshot.json")
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert b"status.token_file" in body
    assert ask(locked, "/")[0] == ask(locked, "/events")[0] == ask(locked, "/?token=wrong")[0] == 401
    assert ask(locked, "/snapshot.json", Authorization="Bearer wrong")[0] == 401
    assert ask(locked, "/snapshot.json", Authorization=f"Basic {TOKEN}")[0] == 401
    assert ask(locked, "/snapshot.json", Cookie=f"kvtier-status={TOKEN}")[0] == 401, "the cookie is not the token"
    assert ask(locked, "/snapshot.json", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert ask(locked, "/snapshot.json", Authorization=f"bearer {TOKEN}", Host="kvtier.example")[0] == 200
    assert ask(locked, "/healthz")[0] == 200


def test_a_browser_shows_the_token_once(locked):
    status, headers, _ = ask(locked, f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert TOKEN not in cookie
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/"))
    assert ask(locked, "/", Cookie=cookie.partition(";")[0])[0] == 200
    assert ask(locked, "/", Cookie="kvtier-status=no")[0] == 401


def test_a_cookie_outlives_a_restart_and_not_another_token():
    assert Access(b"a" * 20).cookie == Access(b"a" * 20).cookie != Access(b"b" * 20).cookie


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (None, 0, "cannot be read"),
        ("", 0o600, "has no token of 16"),
        ("short", 0o600, "has no token of 16"),
        ("two words that are long enough", 0o600, "has no token of 16"),
        (TOKEN, 0o604, "chmod o-rwx"),
    ],
)
def test_a_token_file_that_is_of_no_use(tmp_path, fleet, text, mode, says):
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        read_token(file)
    page = Page(fleet, host="127.0.0.1", port=0, token_file=file)
    assert page.url == ""
    assert page.fault.startswith("no status page: status.token_file")
    assert says in page.fault
    page.close()


def test_a_port_that_is_taken_is_said(fleet):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        page = Page(fleet, host="127.0.0.1", port=taken.getsockname()[1])
    assert page.url == ""
    assert "set status.port to a free one, or 0" in page.fault
    page.close()


def test_many_follow_and_one_poll_feeds_them(page, fleet, events):
    streams = [events(page) for _ in range(20)]
    seen = [stream.numbers(10) for stream in streams]
    taken = fleet.taken
    for found in seen:
        assert found == sorted(set(found)), "each newer than the one before"
        assert found[-1] <= taken
    assert taken < 20 * 10, "far fewer than were shown"


def test_one_who_does_not_read_holds_up_nobody(page, fleet, events, monkeypatch):
    fill = "x" * (1 << 20)  # more than fits into a socket's buffers soon
    monkeypatch.setattr(Fleet, "__call__", lambda self, call=Fleet.__call__: call(self) | {"fill": fill})
    idle = [events(page) for _ in range(3)]
    assert len(events(page).numbers(30)) == 30
    assert idle[0].numbers(1)[0] < 30, "and it still gets what it was sent"


def test_a_controller_that_hangs_holds_up_only_its_snapshot(page, fleet):
    assert ask(page, "/snapshot.json")[0] == 200
    fleet.hold.clear()
    assert ask(page, "/healthz")[0] == 200
    assert ask(page, "/")[0] == 200
    assert ask(page, "/history.json")[0] == 200
    fleet.hold.set()
    assert ask(page, "/snapshot.json")[0] == 200


def test_further_ones_than_may_are_told_so(page, events, monkeypatch):
    monkeypatch.setattr("kvtier_services.monitor.page.app.MOST", 2)
    streams = [events(page), events(page)]
    for stream in streams:
        stream.numbers(1)
    status, _, body = ask(page, "/events")
    assert status == 503
    assert b"/snapshot.json" in body
    streams[0].close()
    deadline = time.monotonic() + 20
    while True:
        try:
            assert events(page).numbers(1)
        except AssertionError:
            assert time.monotonic() < deadline
        else:
            break


def test_closed_it_answers_nobody(fleet, events):
    page = Page(fleet, host="127.0.0.1", port=0)
    stream = events(page)
    stream.numbers(1)
    page.close()
    with pytest.raises(AssertionError, match="it ended"):
        stream.numbers(1 << 30)
    page.close()
    with pytest.raises(OSError, match="refused"):
        ask(page)


def connect(page: Page, says: bytes = b"") -> socket.socket:
    host, port = page.url.removeprefix("http://").rstrip("/").split(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    made.sendall(says)
    return made


def is_cut_off(connected: socket.socket) -> bool:
    """Raises `TimeoutError` when it is not."""
    try:
        while connected.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    return True


def test_those_who_connect_and_do_not_ask_are_cut_off(locked, page, events, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE", 0.3)
    with contextlib.ExitStack() as stack:
        begun = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
        silent, slow = (stack.enter_context(connect(locked, says)) for says in (b"", begun))
        again = stack.enter_context(connect(locked, begun + b"\r\n"))
        assert again.recv(1 << 16).startswith(b"HTTP/1.1 200")
        again.sendall(begun)
        assert all(map(is_cut_off, (silent, slow, again)))
    before = time.monotonic()
    stream = events(page)
    while time.monotonic() < before + 1.0:
        assert stream.numbers(1), "who is being answered is not"


def test_many_idle_ones_keep_out_nobody_for_long(fleet, monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 4)
    monkeypatch.setattr(connection, "PATIENCE", 0.5)
    page = Page(fleet, host="127.0.0.1", port=0)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(page)) for _ in range(12)]
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ask(page, "/healthz")[0] == 200:
                    break
            assert time.monotonic() < deadline
        assert all(map(is_cut_off, idle))
    page.close()


def test_who_shows_the_token_is_sent_nowhere_else(locked):
    for host in ("evil//evil.example", "evil.example", "a?b", "[", "a/b"):
        status, headers, _ = ask(locked, f"/?token={TOKEN}", Host=host)
        assert (status, headers.get("location")) == (303, "/"), host
    for path in ("//evil.example/", "/page.js/", "//", "/%2f", "/%2fevil.example/", "/healthz/"):
        status, headers, _ = ask(locked, f"{path}?token={TOKEN}", Host="evil.example")
        assert (status, headers.get("location")) == (404, None), path
    status, headers, _ = ask(locked, f"http://evil.example/?token={TOKEN}")
    assert (status, headers.get("location")) in ((303, "/"), (404, None))


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 70}.example", "192.0.2.1"])
def test_an_address_that_cannot_be_is_said(fleet, host):
    page = Page(fleet, host=host, port=0)
    assert page.url == ""
    assert "status.host to an address of this machine" in page.fault
    page.close()


def test_a_page_that_has_ended_says_so(fleet, monkeypatch):
    def broken(*_args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(server, "app", broken)
    page = Page(fleet, host="127.0.0.1", port=0)
    assert (page.url, page.fault) == ("", "no status page: it has ended (no such thing)")
    page.close()


async def test_the_history_goes_on_after_the_clock_was_set_back():
    times = iter([1000.0, 1005.0, 1010.0, 1006.0, 1011.0, 200.0, 205.0])
    watched = Feed(lambda: {"taken": next(times), "hosts": []})
    for _ in range(7):
        await watched._take()
    assert [each["taken"] for each in json.loads(watched.history())["points"]] == [200.0, 205.0]


async def test_a_snapshot_that_cannot_be_written_down_is_said_and_kept_from_nobody_else():
    odd = iter([{"hosts": [], "taken": 1.0, "of": {(1, 2): 3}}, {"hosts": [], "taken": 2.0, "rate": float("nan")}])
    watched = Feed(lambda: next(odd))
    await watched._take()
    with pytest.raises(LookupError, match="key"):
        await watched.now()
    await watched._take()
    assert json.loads(await watched.now()) == {"hosts": [], "taken": 2.0, "rate": None}


async def test_the_poll_is_slow_while_nobody_looks(monkeypatch):
    monkeypatch.setattr(feed, "WATCHED", 0.01)
    monkeypatch.setattr(feed, "ALONE", 60.0)
    fleet = Fleet()
    watched = Feed(fleet)
    running = asyncio.create_task(watched.run())
    await asyncio.sleep(0.3)
    assert fleet.taken == 1
    async with contextlib.aclosing(watched.follow()) as stream:
        seen = [json.loads(await anext(stream))["number"] for _ in range(5)]
    assert seen[-1] >= 4
    assert watched.following == 0
    running.cancel()


async def test_only_so_many_may_follow(monkeypatch):
    monkeypatch.setattr(feed, "MOST", 0)
    with pytest.raises(Full):
        await anext(Feed(Fleet()).follow())


async def test_one_who_follows_hears_that_nothing_is_new(monkeypatch):
    monkeypatch.setattr(feed, "BEAT", 0.05)
    fleet = Fleet()
    fleet.trouble = "away"
    watched = Feed(fleet)
    running = asyncio.create_task(watched.run())
    async with contextlib.aclosing(watched.follow()) as stream:
        assert await anext(stream) == b""
        fleet.trouble = ""
        while not (said := await anext(stream)):
            pass
    assert json.loads(said)["schema"] == 1
    running.cancel()


async def test_history_is_a_quarter_of_an_hour(monkeypatch):
    at = iter(range(0, 4000, 4))
    watched = Feed(lambda: {"taken": float(next(at)), "hosts": [{"host": "a"}]})
    for _ in range(1000):
        await watched._take()
    points = json.loads(watched.history())["points"]
    times = [each["taken"] for each in points]
    assert times == sorted(times)
    assert times[-1] - times[0] <= feed.KEPT
    assert len(points) > 100


def test_a_point_of_the_history():
    hierarchy = {
        "tiers": [{"tier": "cpu", "used": 5}, {"tier": "nvme", "used": 9}],
        "hits": {"cpu": 3, "nvme": 1},
        "misses": {"absent": 6},
        "moved_nbytes": {"cpu>nvme": 7},
    }
    assert point({"host": "a", "hierarchy": hierarchy}) == {
        "used": {"cpu": 5, "nvme": 9},
        "hits": 4,
        "asked": 10,
        "moved": {"cpu>nvme": 7},
    }
    assert point({"host": "gone"}) == {"used": {}, "hits": 0, "asked": 0, "moved": {}}

"""The status page in a real browser.

Over a real host its numbers are those of everybody else who counts; over a made-up fleet it is legible, reachable by
keyboard, and careful with what clients say of themselves.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from playwright.sync_api import expect, sync_playwright
from prometheus_client.parser import text_string_to_metric_families

from kvtier.client.door import DoorSession
from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, chain, host_over, save
from kvtier_services.monitor.page import Page
from kvtier_services.monitor.snapshot import snapshot
from tests.cluster.kit import Cluster, blocks_read, cluster_in_temporary_folders, within

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def look(browser):
    """Opens a page; at the end it must have said nothing on its console, and asked nobody but where it came from."""
    opened = []

    def open_page(url: str, *, scheme: str = "light", width: int = 1280):
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        page = context.new_page()
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        opened.append((context, page, url, said, asked))
        page.goto(url)
        page.wait_for_selector(".host")
        return page

    yield open_page
    for context, _page, url, said, asked in opened:
        context.close()
        assert [line for line in said if "ERR_CONNECTION_REFUSED" not in line] == []
        assert {each for each in asked if not each.startswith((url, "data:"))} == set()


def figures(page) -> dict[str, float]:
    found = page.eval_on_selector_all(
        "[data-name]", "nodes => nodes.map(node => [node.dataset.name, node.dataset.value, node.textContent])"
    )
    assert all(text for _, _, text in found)
    return {name: float(value) for name, value, _ in found}


# A real host


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Cluster, str]]:
    """A kvtier that an engine has used, and where its page is."""
    with cluster_in_temporary_folders() as cluster:
        url = re.search(r"status page: (\S+)", cluster.cli("up"))[1]
        session = DoorSession(cluster.socket)
        assert save(session, 0, 40) == 40
        for _ in range(3):
            assert blocks_read(session, 0, 40) == 40
        assert blocks_read(session, 0, 50) == 40
        assert blocks_read(session, 5000, 7) == 0
        within(30, lambda: _settled(cluster))
        held = session.match(chain(0, 3), 0.0)
        yield cluster, url
        session.release(held.lease)
        session.close()


def _settled(cluster: Cluster) -> bool:
    """Whether the background has nothing more to do: figures stand still."""
    first = cluster.host()["hierarchy"]
    time.sleep(1.0)
    again = cluster.host()["hierarchy"]
    names = ("moves", "tiers", "hits", "misses", "index", "stored")
    return (
        again["index"]["queued"] == 0
        and not any(again["queues"].values())
        and all(first[name] == again[name] for name in names if name != "index")
    )


def test_page_snapshot_terminal_exporter_and_redis_say_the_same(loaded, look):
    cluster, url = loaded
    page = look(url)
    page.wait_for_selector("[data-name=asked]")
    with urllib.request.urlopen(f"{url}snapshot.json", timeout=20) as answer:
        seen = json.load(answer)
    shown, said = figures(page), cluster.status()
    (host,) = said["hosts"]
    hierarchy = host["hierarchy"]
    assert seen["schema"] == said["schema"] == 1
    for name in ("hits", "misses", "moves", "moved_nbytes", "tokens", "stored", "blocks", "refused", "dropped"):
        assert seen["hosts"][0]["hierarchy"][name] == hierarchy[name], name
    assert seen["totals"] == said["totals"]

    asked = 40 * 3 + 50 + 7 + 3
    assert sum(hierarchy["hits"].values()) == 40 * 4 + 3
    assert hierarchy["misses"]["absent"] == 10 + 7
    assert shown["asked"] == shown["totals.asked"] == asked
    assert shown["misses"] == 17
    for tier, blocks in hierarchy["hits"].items():
        assert shown[f"hits.{tier}"] == blocks
    for tier in hierarchy["tiers"]:
        for name in ("used", "capacity", "blocks"):
            assert shown[f"tier.{tier['label']}.{name}"] == tier[name], (tier["tier"], name)
    for way, blocks in hierarchy["moves"].items():
        assert shown[f"moves.{way}"] == blocks
    distinct = hierarchy["window"]["distinct"]
    assert shown["window.distinct"] == distinct == pytest.approx(57, abs=1)  # an estimate
    assert shown["window.ceiling"] == shown["window.ratio"] == pytest.approx(163 / asked), (
        "saved before it was asked for"
    )
    assert page.locator("#health .badge").get_attribute("data-value") == said["health"]

    with urllib.request.urlopen(host["metrics"]["url"], timeout=20) as answer:
        scraped = {
            (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "host"))): sample.value
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        }
    for tier in hierarchy["tiers"]:
        for name, field in (("used_bytes", "used"), ("capacity_bytes", "capacity"), ("blocks", "blocks")):
            assert scraped[f"kvtier_tier_{name}", (("tier", tier["tier"]),)] == tier[field]
        assert scraped["kvtier_hit_blocks_total", (("tier", tier["tier"]),)] == hierarchy["hits"].get(tier["tier"], 0)
    assert scraped["kvtier_asked_blocks_total", ()] == asked
    assert scraped["kvtier_miss_blocks_total", (("reason", "absent"),)] == 17
    assert scraped["kvtier_window_distinct_blocks", ()] == distinct

    password = (cluster.run_dir / "redis.password").read_text().strip()
    with redis.Redis(unix_socket_path=str(cluster.run_dir / "redis.sock"), password=password) as server:
        known = sum(len(key) == 34 for key in server.scan_iter(count=1000))
    assert known == hierarchy["blocks"] == 40

    terminal = cluster.cli("status")
    assert f"of {asked} blocks asked for" in terminal
    assert f"page {url}" in terminal


def test_it_follows_what_happens(loaded, look):
    cluster, url = loaded
    page = look(url)
    page.wait_for_selector("[data-name=asked]")
    before = figures(page)["asked"]
    session = DoorSession(cluster.socket)
    assert blocks_read(session, 0, 20) == 20
    session.close()
    expect(page.locator("[data-name=asked]")).to_have_attribute("data-value", f"{before + 20:.0f}", timeout=30_000)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360)])
def test_the_real_host_as_a_picture(loaded, look, scheme, width):
    page = look(loaded[1], scheme=scheme, width=width)
    page.wait_for_selector("[data-part=tiers] table")
    file = SHOTS / f"host-{scheme}-{width}.png"
    page.screenshot(path=file, full_page=True)
    assert file.stat().st_size > 10_000


# A made-up fleet


class Fleet:
    """Hosts over a real host's status."""

    def __init__(self) -> None:
        with host_over(Arena.private(CAPACITY)) as made:
            self._hierarchy = made.hierarchy.status()
        self.hosts = [self.host("a")]

    def host(self, name: str, **changes: object) -> dict:
        hierarchy = copy.deepcopy(self._hierarchy) | changes
        about = {"host": name, "serving": True, "pid": 7, "started": time.time() - 60, "hands": [], "fault": ""}
        return about | {"metrics": {"url": "http://m", "fault": ""}, "socket": "/s", "hierarchy": hierarchy}

    def __call__(self) -> dict:
        return snapshot({"version": "9", "started": 1.0, "here": "a", "ray": {}, "redis": {}}, self.hosts)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def page_url(fleet) -> Iterator[str]:
    page = Page(fleet, host="127.0.0.1", port=0)
    yield page.url
    page.close()


def test_what_clients_say_is_text(fleet, page_url, look):
    evil = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
    held = {"kind": "lease", "owner": evil, "age": 99.0, "nbytes": 5, "stuck": True}
    peer = {"host": evil, "door": evil, "blocks": 1, "bytes": 1, "bytes_per_second": 0.0, "avoided": 0.0, "fault": evil}
    tenant = {"tenant": evil, "sessions": 1, "nbytes": {}, "pinned_nbytes": 0, "quota": {}, "refused": {evil: 1}}
    fleet.hosts = [
        fleet.host("a", held=[held], misses={evil: 3}, peers={"fault": evil, "counters": {}, "hosts": [peer]})
        | {"remote": {"address": evil, "tls": True, "faults": [evil], "tenants": [tenant]}},
        {"host": evil, "serving": False, "fault": evil},
    ]
    page = look(page_url)
    page.wait_for_selector("[data-part=held] table")
    assert page.evaluate("window.broken") is None
    assert page.locator("img, main script").count() == 0
    assert page.get_by_text(evil).count() >= 6


def test_what_is_wrong_stands_at_the_top(fleet, page_url, look):
    page = look(page_url)
    assert page.locator("#health").inner_text() == "fleet ok"
    assert page.locator("#reasons li").count() == 0
    fleet.hosts[0]["hierarchy"]["tiers"][-1]["fault"] = "disk gone"
    fleet.hosts.append({"host": "b", "serving": False, "gone_since": time.time() - 300})
    page.wait_for_selector("#reasons li")
    assert page.locator("#health").inner_text() == "fleet degraded: 1 degraded, 1 down"
    assert page.locator("#reasons li").all_inner_texts() == ["a: nvme: disk gone", "b: gone for 5.0 min"]
    assert page.title() == "degraded: kvtier"
    assert [page.locator(".host").nth(i).get_attribute("data-host") for i in (0, 1)] == ["b", "a"], "trouble first"
    fleet.hosts.pop()
    expect(page.locator(".host")).to_have_count(1, timeout=30_000)


def test_a_host_that_is_opened_again_shows_what_moves(fleet, page_url, look):
    moved = fleet.hosts[0]["hierarchy"]["moved_nbytes"]
    page = look(page_url)
    began, flows = time.monotonic(), page.locator(".flows")
    while "/s" not in flows.get_attribute("aria-label"):
        assert time.monotonic() < began + 30
        moved["cpu>nvme"] = moved.get("cpu>nvme", 0) + (1 << 20)
        page.wait_for_timeout(200)
    again = """async (host) => {
      for (const open of [false, true]) {
        host.open = open;
        await new Promise((done) => host.addEventListener("toggle", () => setTimeout(done), { once: true }));
      }
      return host.querySelector(".flows").getAttribute("aria-label");
    }"""
    assert re.fullmatch(r"cpu to nvme [\d.]+ \w+/s", page.locator(".host").evaluate(again))


def test_fifty_hosts(fleet, page_url, look):
    fleet.hosts = [fleet.host(f"node-{i:02}") for i in range(50)]
    page = look(page_url)
    expect(page.locator(".host")).to_have_count(50, timeout=30_000)
    page.get_by_label("Filter").fill("node-4")
    assert page.locator(".host:visible").count() == 10
    page.get_by_label("Filter").fill("")
    page.locator(".host summary").first.click()
    page.wait_for_selector("[data-part=tiers] table")
    page.screenshot(path=SHOTS / "fifty-hosts.png", full_page=True)


def test_an_older_host_that_says_less(fleet, page_url, look):
    for name in ("window", "hot", "leased", "stuck", "oldest", "transfers", "evicted", "saved_seconds", "codecs"):
        del fleet.hosts[0]["hierarchy"][name]
    page = look(page_url)
    page.wait_for_selector("[data-part=tiers] table")
    assert page.locator("#lost").is_hidden()


def test_a_lost_connection_is_said_and_made_again(fleet, look, monkeypatch):
    first = Page(fleet, host="127.0.0.1", port=0)
    port = int(first.url.rstrip("/").rpartition(":")[2])
    page = look(first.url)
    first.close()
    page.wait_for_selector("#lost:not([hidden])", timeout=60_000)
    assert page.locator("#lost").inner_text().startswith("No answer since")
    second = Page(fleet, host="127.0.0.1", port=port)
    try:
        assert second.fault == ""
        page.wait_for_selector("#lost", state="hidden", timeout=60_000)
    finally:
        second.close()


def test_all_of_it_is_reached_by_keyboard(fleet, page_url, look):
    fleet.hosts = [fleet.host(f"n{i}") for i in range(7)]
    page = look(page_url)
    expect(page.locator(".host")).to_have_count(7, timeout=30_000)
    reached = []
    for _ in range(10):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className || '-'"))
        reached[-1] += f" {page.evaluate('document.activeElement.tagName')}"
    assert reached == ["skip A", "filter INPUT", *["- SUMMARY"] * 7, "- A"]
    page.evaluate("document.querySelector('.host summary').focus()")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-part=tiers] table")
    time.sleep(2.5)
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY", "it keeps the focus while figures change"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map((c) => linear(c / 255))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const c = rgb(getComputedStyle(node).backgroundColor);
      if (c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest("svg")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(back(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.className, node.textContent.slice(0, 40)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(fleet, page_url, look, scheme):
    fleet.hosts[0]["hierarchy"]["tiers"][-1]["fault"] = "disk gone"
    fleet.hosts += [
        {"host": "b", "serving": False, "gone_since": time.time() - 300},
        {"host": "c", "serving": False, "drained_since": time.time() - 300},
    ]
    page = look(page_url, scheme=scheme)
    page.wait_for_selector("[data-part=tiers] table")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 40
    assert [each for each in found if each[0] < 4.5] == []


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_nothing_sticks_out(fleet, page_url, look, width):
    fleet.hosts[0]["socket"] = "/a/very/long/folder/" + "deep/" * 30 + "door.sock"
    fleet.hosts[0]["hierarchy"]["held"] = [
        {"kind": "lease", "owner": "o" * 200, "age": 99.0, "nbytes": 5, "stuck": True}
    ]
    page = look(page_url, width=width)
    page.wait_for_selector("[data-part=held] table")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

"""The documentation as a site: built strictly, needing nothing from elsewhere, every page reachable."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}
RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch", "manifest"}


class Page(HTMLParser):
    """What a page loads, links to, and can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        self.loads += [found[name] for kind, name in LOADS if kind == tag and found.get(name)]
        if tag == "link" and RELATIONS & set((found.get("rel") or "").split()):
            self.loads.append(found["href"])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])


def build(*options: str, folder: Path, **changes: str) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).with_name("mkdocs"), "build", "--strict", "--site-dir", folder, *options]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environ | changes, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Page]:
    return {str(path.relative_to(site)): Page(path.read_text()) for path in site.rglob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site, pages):
    for name, page in pages.items():
        assert [url for url in page.loads if urlparse(url).netloc] == [], name
        targets = [unquote(urlparse(urljoin(f"https://site/{name}", url)).path).lstrip("/") for url in page.loads]
        assert [target for target in targets if not (site / target).is_file()] == [], name
    for sheet in site.rglob("*.css"):
        fetched = re.findall(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')]+)""", sheet.read_text())
        assert fetched == [], sheet


def test_every_link_and_anchor_within_the_site_leads_somewhere(pages):
    checked = 0
    for name, page in pages.items():
        if name == "404.html":
            continue  # its links are absolute: it is served for any address
        for link in page.links:
            if urlparse(link).scheme:
                continue
            target, anchor = urldefrag(urljoin(f"https://site/{name}", link))
            path = unquote(urlparse(target).path).lstrip("/")
            if path.endswith(".html"):
                assert path in pages, f"{name}: {link}"
                assert not anchor or unquote(anchor) in pages[path].anchors, f"{name}: {link}"
                checked += 1
    assert checked > 1000


def test_every_page_can_be_reached_from_the_first(pages):
    reached, ahead = set(), ["index.html"]
    while ahead:
        name = ahead.pop()
        if name in reached:
            continue
        reached.add(name)
        links = (urlparse(urljoin(f"https://site/{name}", link)) for link in pages[name].links)
        ahead += [path for link in links if link.netloc == "site" and (path := unquote(link.path).lstrip("/")) in pages]
    assert pages.keys() - reached == {"404.html"}


def test_every_public_name_is_in_the_reference(pages):
    import kvtier

    anchors = set().union(*(page.anchors for name, page in pages.items() if name.startswith("api/")))
    assert {f"kvtier.{name}" for name in kvtier.__all__} <= anchors
    for name in ("kvtier.Space.match", "kvtier.Hit.load", "kvtier.flow.Flow", "kvtier.errors.KVTierError"):
        assert name in anchors


def test_nothing_of_what_makes_the_site_is_in_it(site):
    assert not list(site.rglob("*.py"))
    assert not (site / "site").exists()


def broken(tmp_path: Path, name: str, text: str) -> Path:
    """A copy of the documentation with one page more, or another one; its mkdocs.yml."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    (tmp_path / "docs" / name).write_text(text)
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        (ROOT / "mkdocs.yml").read_text().replace("paths: [., services]", f"paths: [{ROOT}, {ROOT}/services]")
    )
    return config


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("index.md", "# kvtier\n\n[nowhere](nowhere.md)\n", "nowhere.md"),
        ("index.md", "# kvtier\n\n[no anchor](keys.md#nowhere)\n", "#nowhere"),
        ("index.md", "# kvtier\n\n[out of the site](../README.md)\n", "../README.md"),
        ("lost.md", "# In no navigation\n", "lost.md"),
        ("index.md", "# kvtier\n\n::: kvtier.no_such_module\n", "kvtier.no_such_module"),
    ],
)
def test_a_broken_page_fails_the_build(tmp_path, name, text, said):
    config = broken(tmp_path, name, text)
    done = build("--config-file", config, folder=tmp_path / "site")
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


def test_the_navigation_names_each_page_once():
    text = re.sub(r"!!python\S*", "", (ROOT / "mkdocs.yml").read_text())
    named = re.findall(r"[\w/]+\.md", str(yaml.safe_load(text)["nav"]))
    assert len(named) == len(set(named))


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
def test_a_browser_asks_nobody_else_and_search_works(site):
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    here = f"http://127.0.0.1:{server.server_port}"
    asked: list[str] = []
    problems: list[str] = []
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                page = browser.new_page(color_scheme=scheme)
                page.on("request", lambda request: asked.append(request.url))
                page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
                page.on("pageerror", lambda error: problems.append(str(error)))
                for name in ("index.html", "concepts.html", "api/kvtier.html"):
                    page.goto(f"{here}/{name}")
                body = page.locator("body")
                assert body.get_attribute("data-md-color-scheme") == {"light": "default", "dark": "slate"}[scheme]
                page.goto(f"{here}/concepts.html")
                drawn = page.locator("img[src='data_path.svg']")
                assert drawn.evaluate("image => image.complete && image.naturalWidth") > 0
                page.goto(f"{here}/index.html")
                page.locator("input[name='query']").fill("arena_dir")
                page.locator(".md-search-result__item").first.wait_for(timeout=30_000)
                page.close()
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert {url for url in asked if not url.startswith((here, "data:", "blob:"))} == set()
    assert problems == []

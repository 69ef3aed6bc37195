"""The blocks of code of README.md and of every page, and running those in Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.door_fixture import Child, folders

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
_BLOCK = re.compile(r"^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of code.

    Attributes:
        page: its page, from the top of the checkout.
        line: where it begins.
        language: what it says of itself.
        text: what is in it.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(*languages: str, page: str = "") -> list[Block]:
    """Those in these languages; without any, all."""
    return [
        Block(name, text.count("\n", 0, found.start()) + 1, found["language"], found["text"])
        for name in ([page] if page else PAGES)
        for text in [text_of(name)]
        for found in _BLOCK.finditer(text)
        if not languages or found["language"] in languages
    ]


def prose(page: str) -> str:
    """What is not in a block."""
    return _BLOCK.sub("", text_of(page))


def run_page(page: str, names: dict[str, Any], **instead: str) -> dict[str, Any]:
    """Run all Python of a page, one block after the other, in one namespace.

    Args:
        page: the page.
        names: what a reader has before.
        **instead: by any names: "what stands there -> what is run", such as an address.
    """
    for block in blocks("python", page=page):
        text = block.text
        for said in instead.values():
            old, _, new = said.partition(" -> ")
            text = text.replace(old, new)
        exec(compile("\n" * block.line + text, page, "exec"), names)
    return names


@contextmanager
def found_host(folder: Path) -> Iterator[Path]:
    """A host in another process, and the kvtier.toml by which `kvtier.connect()` finds it."""
    with folders() as (socket, arena):
        config = folder / "kvtier.toml"
        config.write_text(f"run_dir = {json.dumps(str(socket.parent))}\n")
        child = Child("host", str(socket), str(arena), str(64 << 20))
        try:
            child.says()
            yield config
        finally:
            child.kill()

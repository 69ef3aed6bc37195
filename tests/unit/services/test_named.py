"""What the written pages name is there: metrics, fields of kvtier.toml, commands and their options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from kvtier.config import Config
from kvtier_services.cli import app
from kvtier_services.monitor.metrics import METRICS

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = {"ray.get", "ray.remote", "ray.token"}
"""Functions of Ray's, and a file."""
FIGURES = ("index.bytes_per_block", "index.flatness")
BEHIND = {"counter": ("", "_total"), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}


def fields() -> dict[str, set[str]]:
    """Of each section of kvtier.toml."""
    sections = ((field.name, msgspec.inspect.type_info(field.type)) for field in msgspec.structs.fields(Config))
    return {name: {one.name for one in kind.fields} for name, kind in sections if hasattr(kind, "fields")}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Each command, and the options that its own parser takes; `demo` hands on what it is given."""
    yield path, {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


NAMES = {metric.name + end for metric in METRICS for end in BEHIND[metric.kind]}
FIELDS = fields()
COMMANDS = dict(commands(typer.main.get_command(app))) | {("demo",): {"--json"}}


def wrong(text: str) -> Iterator[str]:
    """What a page names and there is not."""
    for name in {*re.findall(r"(?<!:)\bkvtier_[a-z0-9_]+", text)} - NAMES:
        begun = name.endswith("_") and any(known.startswith(name) for known in NAMES)
        if not begun and not name.startswith("kvtier_services"):
            yield f"the metric {name}"
    for section, field in {*re.findall(r"`([a-z]+)\.([a-z_]+)`", text)}:
        if field not in FIELDS.get(section, {field}) and f"{section}.{field}" not in OTHERS.union(FIGURES):
            yield f"the field {section}.{field}"
    for said in re.findall(r"(?:^|[`/( ])kvtier ((?:[a-z]+|--)[^`\n]*)", text, re.MULTILINE):
        path, words = (), said.partition("#")[0].split()
        while words and (*path, words[0]) in COMMANDS:
            path = (*path, words.pop(0))
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        yield from (f"{name} of kvtier {' '.join(path)}" for name in options - COMMANDS[path] if path)
    for name in re.findall(r"`(?:\.venv/bin/)?kvtier ([a-z]+)", text):
        if (name,) not in COMMANDS:
            yield f"kvtier {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_there_is(page):
    assert list(wrong(page.read_text())) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("`kvtier_hit_blocks_totals`", "the metric kvtier_hit_blocks_totals"),
        ("sum(kvtier_hits_total)", "the metric kvtier_hits_total"),
        ("set `cpu.capacty`", "the field cpu.capacty"),
        ("run `kvtier stat`", "kvtier stat"),
        ("`.venv/bin/kvtier up --adress there:1`", "--adress of kvtier up"),
        ("then kvtier index check --mend", "--mend of kvtier index check"),
    ],
)
def test_what_is_not_there_is_found(text, said):
    assert list(wrong(text)) == [said]


def test_what_is_there_is_not():
    text = "`kvtier_match_seconds_bucket`, `kvtier_index_*`, `vllm:kvtier_x`, `cpu.capacity`, `kvtier up --stay`"
    assert list(wrong(text)) == []

"""What pages say can be typed: commands and options exist, files load, names and paths are there."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path

import msgspec
import pytest
import typer
import yaml

from kvtier.config import Config
from kvtier.config.load import parse
from kvtier_services.cli import app
from kvtier_services.monitor.metrics import METRICS
from tests.examples_fixture import PAGES, ROOT, blocks, prose, text_of

LANGUAGES = {"python", "toml", "yaml", "json", "sh", "console", "text"}
ELSEWHERE = {"sed", "vllm", "docker", "helm", "kubectl", "ray", "prometheus", "promtool", "curl", "sh"}
"""Programs of others: what is said to them is tested where they run."""
COMMAND = typer.main.get_command(app)
SPANS = [(page, span) for page in PAGES for span in re.findall(r"`([^`\n]+)`", prose(page))]


def lines(block) -> list[str]:
    """Commands of a shell block, continued lines joined, comments gone."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    if block.language == "console":
        text = "\n".join(re.findall(r"^\$ (.*)$", text, re.MULTILINE))
    # A quoted argument may go on over several lines.
    found, open_ = [], ""
    for line in text.splitlines():
        open_ += line + "\n"
        try:
            if shlex.split(open_, comments=True):
                found.append(open_)
        except ValueError:
            continue
        open_ = ""
    assert not open_.strip(), f"{block}: a quote is not closed"
    return found


COMMANDS = [(str(block), line) for block in blocks("sh", "console") for line in lines(block)]


def parsed(words: list[str]) -> None:
    """Parse the words of a `kvtier` command line, without running it."""
    command = COMMAND
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"there is no `kvtier {words[0]}`"
        command, words = command.commands[words[0]], words[1:]
    assert not hasattr(command, "commands"), "a command is missing"
    command.make_context("kvtier", list(words))


def test_every_block_says_its_language():
    assert {(str(block), block.language) for block in blocks() if block.language not in LANGUAGES} == set()
    indented = re.compile(r"(?:^|\n)\n {4}\S")
    assert [
        page
        for page in PAGES
        if indented.search(re.sub(r"(?m)^(\* |- |\d+\. ).*\n(?:\n?(?: +.*)\n)*", "", prose(page)))
    ] == []


@pytest.mark.parametrize(("place", "line"), COMMANDS, ids=[f"{place} {line[:40].strip()}" for place, line in COMMANDS])
def test_what_is_typed_exists(place, line):
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_a-z]+=\S*", words[0]):
        words.pop(0)
    program = words.pop(0) if words else ""
    if program.endswith("kvtier"):
        parsed(words)
    elif program == "make":
        assert re.search(rf"^{re.escape(words[0])}:", text_of("Makefile"), re.MULTILINE)
    elif program.rpartition("/")[2] in ("python", "python3") and words[0] == "-m":
        if words[1].partition(".")[0] not in ("sglang", "vllm"):
            spec = importlib.util.find_spec(words[1])
            assert spec is not None, f"there is no module {words[1]}"
            assert_options(words[2:], Path(spec.origin).parent)
    elif program.rpartition("/")[2] in ("python", "python3"):
        assert (ROOT / words[0]).is_file()
    elif program == "pip":
        extra = re.fullmatch(r"kvtier(?:\[(\w+)\])?", words[1])
        assert words[0] == "install"
        assert extra
        assert not extra[1] or extra[1] in tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    elif "/" in program:
        assert (ROOT / program).is_file()
    elif program:
        assert program in ELSEWHERE, f"what is {program}?"


def assert_options(words, folder) -> None:
    """The options of a module stand in its source, or in that of its neighbours."""
    source = "".join(file.read_text() for file in folder.glob("*.py"))
    for word in words:
        assert not word.startswith("--") or f'"{word}"' in source, f"nothing in {folder} has {word}"


def test_commands_within_sentences_exist():
    for page, span in SPANS:
        words = re.sub(r"[\[\]]", " ", span).split()
        if words[:1] == ["kvtier"] and len(words) > 1 and words[1].islower():
            command = COMMAND
            for word in words[1:]:
                if hasattr(command, "commands"):
                    assert word in command.commands, f"{page}: `{span}`"
                    command = command.commands[word]
                elif word.startswith("--"):
                    options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
                    assert word in options or command.name == "demo", f"{page}: `{span}`"


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_a_kvtier_toml_of_a_page_can_be_read(block):
    assert isinstance(parse(tomllib.loads(block.text), block.text), Config)


def test_data_of_a_page_can_be_read():
    for block in blocks("json", "yaml"):
        read = json.loads if block.language == "json" else yaml.safe_load
        assert all(map(read, re.split(r"(?m)^---$", block.text))), block


def test_fields_within_sentences_exist():
    """`benchmarks.md` names figures in the same way."""
    sections = {info.name: info.type for info in msgspec.structs.fields(Config)}
    checked = 0
    for page, span in SPANS:
        found = re.fullmatch(r"(\w+)\.(\w+)(?: = .*)?", span)
        if page != "docs/benchmarks.md" and found and hasattr(sections.get(found[1]), "__struct_fields__"):
            known = sections[found[1]].__struct_fields__
            assert found[2] in known or (page, span) in NO_FIELDS, f"{page}: `{span}`"
            checked += 1
    assert checked > 60


NO_FIELDS = {("docs/kubernetes.md", "ray.token"), ("docs/architecture.md", "ray.remote"), ("docs/peers.md", "ray.get")}
NO_MODULES = {"kvtier.toml", "kvtier.cpu", "kvtier.gpu", "kvtier.nvme"}
"""A file, and Ray's resources."""


def test_paths_within_sentences_exist():
    """Of this checkout: `peers.md` names files of other projects."""
    paths = re.compile(r"(?:tests|examples|benchmarks|k8s|services|docs|kvtier)/[\w./-]*\w")
    missing = {
        (page, span)
        for page, span in SPANS
        if page != "docs/peers.md"
        for path in [span.split()[0].rstrip("/")]
        if paths.fullmatch(path)
        and not (ROOT / path).exists()
        and not path.startswith(("kvtier/nvme", "kvtier/tokens"))
    }
    assert missing == set()


def test_modules_and_names_within_sentences_exist():
    for page, span in SPANS:
        found = re.fullmatch(r"(kvtier(?:_services)?(?:\.\w+)+)(?:\(.*\))?", span)
        if found and found[1] not in NO_MODULES:
            assert exists(found[1]), f"{page}: `{span}`"


def exists(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_metrics_that_are_named_exist():
    known = set()
    for metric in METRICS:
        ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}[metric.kind]
        known |= {metric.name + end for end in ends}
    named = [(page, name) for page in PAGES for name in re.findall(r"(?<![\w:])kvtier_[a-z_]+\b\*?", text_of(page))]
    for page, name in named:
        if name != "kvtier_services":
            assert fnmatch.filter(known, name), f"{page}: {name}"
    assert len(named) > 100


def test_the_readme_is_one_screen_of_what_and_why():
    assert len(text_of("README.md").splitlines()) <= 80
    [block] = blocks("python", page="README.md")
    assert sum(bool(line.strip()) for line in block.text.splitlines()) <= 12


def test_links_between_pages_lead_somewhere():
    """Those of the README, which is no page of the site; mkdocs holds the others, in tests/ops."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of("README.md")):
        assert (ROOT / target).is_file(), target

"""Write the pages that say what the code says: `python -m docs.site.reference`, after a field or an option changed.

configuration.md   every field of a kvtier.toml, from `kvtier.config`
commands.md        every command and option, from the `kvtier` command itself
metrics.md         every metric, from the exporter's table
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import typer
from msgspec import NODEFAULT, Meta, Struct

from docs.site.metrics import metrics
from kvtier.config import Config, Duration, Size
from kvtier.config.load import written
from kvtier_services.cli import app

DOCS = Path(__file__).parents[1]
_TYPES = {str: "text", bool: "true or false", int: "whole number", float: "number", Size: "size", Duration: "duration"}
_BOUNDS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))
_DEFAULT = re.compile(r"\s*Default: (?P<said>.*?)\.(?= [A-Z]|$)")
"""What a description says of a default that is worked out on the machine."""

_CONFIGURATION = """\
# Configuration

What a `kvtier.toml` may say. Every field has a default, so there need not be a file. Which file is read: `--config`,
else `$KVTIER_CONFIG`, else `./kvtier.toml`. `kvtier config explain` prints all of this with the values that hold on a
machine. An unknown name, a wrong type or a value that cannot work is refused, with the line and what to set.

A *size* is a number of bytes or `"512MiB"`, `"32GiB"` (powers of 1024), `"500GB"` (powers of 1000); a *duration* is
`"250ms"`, `"30s"`, `"5m"` or `"1h"`. In folders `{host}` stands for the host's name.

(Generated: `python -m docs.site.reference`.)
"""
_COMMANDS = """\
# Command line

Exit codes: 0 for done, 1 for not, with one line that says what to change, 2 for a command line that makes no sense.
`kvtier COMMAND --help` says the same.

(Generated: `python -m docs.site.reference`.)
"""


def configuration() -> str:
    """The page of `kvtier.toml`."""
    top = [info for info in msgspec.structs.fields(Config) if not _is_section(info)]
    parts = [_CONFIGURATION, "## At the top\n", _table(top)]
    for info in filter(_is_section, msgspec.structs.fields(Config)):
        parts += [f"## [{info.name}]\n", f"{_linked(info.type.__doc__)}\n", _table(msgspec.structs.fields(info.type))]
    return "\n".join(parts)


def commands() -> str:
    """The page of the command line."""
    root = typer.main.get_command(app)
    return "\n".join([_COMMANDS, *_commands(root, "kvtier", 2)])


def _is_section(info: Any) -> bool:
    return isinstance(info.type, type) and issubclass(info.type, Struct)


def _table(fields: Any) -> str:
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    for info in fields:
        said = next(meta.description for meta in info.type.__metadata__ if isinstance(meta, Meta) and meta.description)
        default = _DEFAULT.search(said)
        if info.default is not NODEFAULT:
            shown = f"`{written(info.default)}`"
        else:
            shown = default["said"] if default else "worked out"
            said = _DEFAULT.sub("", said)
        rows.append(f"| `{info.name}` | {_type(info.type)} | {_cell(shown)} | {_cell(said)} |")
    return "\n".join(rows) + "\n"


def _type(kind: Any) -> str:
    if hasattr(kind, "__metadata__"):
        metas = [meta for meta in kind.__metadata__ if isinstance(meta, Meta)]
        bounds = [
            f"{word} {_number(getattr(m, at))}" for m in metas for at, word in _BOUNDS if getattr(m, at) is not None
        ]
        return ", ".join([_type(kind.__origin__), *bounds])
    if get_origin(kind) is tuple:
        return f"list of {_type(get_args(kind)[0])}"
    if get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(map(_type, get_args(kind)))
    return _TYPES[kind]


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"


def _cell(text: str) -> str:
    """Text for a table; what looks like markup is what it is."""
    plain = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return _linked(plain)


def _linked(text: str) -> str:
    """Text of the code, in which pages are named as they lie in the checkout."""
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def _commands(command: Any, name: str, level: int) -> Iterator[str]:
    """A command, and those below it."""
    yield f"{'#' * level} {name}\n"
    yield f"{_linked((command.help or '').strip())}\n"
    context = typer.Context(command, info_name=name)
    if hasattr(command, "list_commands"):
        for below in command.list_commands(context):
            yield from _commands(command.commands[below], f"{name} {below}", min(level + 1, 3))
        return
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{name} {usage}\n```\n"
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [
        f"| `{names.replace(' range>', '>')}` | {_cell(said)} |"
        for names, said in filter(None, records)
        if "--help" not in names
    ]
    if rows:
        yield "\n".join(["| option or argument | |", "|---|---|", *rows]) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "commands.md": commands,
    "metrics.md": metrics,
}


def main() -> None:
    """Write all of them."""
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    main()

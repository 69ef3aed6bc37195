"""From a file to a `Config`."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from kvtier.config.schema import Config
from kvtier.config.units import Duration, Size
from kvtier.errors import ConfigError

ENV = "KVTIER_CONFIG"
NAME = "kvtier.toml"
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?")
_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)


def find(path: str | Path | None = None) -> Path | None:
    """The file that holds: the argument, $KVTIER_CONFIG, ./kvtier.toml; None when there is none.

    Raises:
        ConfigError: a file that was named is not there.
    """
    for named, by in ((path, ""), (os.environ.get(ENV), f" (${ENV})")):
        if named:
            found = Path(named).expanduser()
            if not found.is_file():
                raise ConfigError(f"there is no file {found}{by}; name a kvtier.toml, or none for the defaults")
            return found
    return Path(NAME) if Path(NAME).is_file() else None


def load(path: str | Path | None = None) -> Config:
    """Read and check the configuration; the defaults where there is no file.

    Raises:
        ConfigError: says which field, on which line, and what to set.
    """
    found = find(path)
    if found is None:
        return Config()
    try:
        text = found.read_text(encoding="utf-8")
        raw = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{found} cannot be read: {exc}") from exc
    return parse(raw, text, str(found))


def parse(raw: dict[str, Any], text: str = "", name: str = NAME) -> Config:
    """Check what a file says.

    Args:
        raw: its tables.
        text: of the file, to say on which line something is wrong.
        name: of the file.
    """
    try:
        return msgspec.convert(raw, Config, dec_hook=_decode)
    except msgspec.ValidationError as exc:
        cause = exc.__cause__
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{name}: {cause}") from exc
        raise ConfigError(_explained(str(exc), text, name)) from exc
    except ConfigError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


def explain(config: Config | None = None) -> str:
    """Every field with its description, and its value in `config` (default: the defaults), as a kvtier.toml."""
    config = config or Config()
    blocks = [_fields(config, Config)]
    for info in msgspec.structs.fields(Config):
        section = getattr(config, info.name)
        if isinstance(section, msgspec.Struct):
            blocks.append(f"# {section.__doc__}\n[{info.name}]\n{_fields(section, type(section))}")
    return "\n\n".join(blocks) + "\n"


def _fields(values: msgspec.Struct, kind: type[msgspec.Struct]) -> str:
    lines = []
    for info in msgspec.structs.fields(kind):
        value = getattr(values, info.name)
        if not isinstance(value, msgspec.Struct):
            said = next(meta.description for meta in info.type.__metadata__ if meta.description)
            lines += [f"# {said}", f"{info.name} = {written(value)}"]
    return "\n".join(lines)


def written(value: object) -> str:
    """A value as a kvtier.toml has it."""
    if isinstance(value, str | Size | Duration):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _decode(kind: type, value: object) -> object:
    if issubclass(kind, Size | Duration):
        return kind.parse(value)
    raise NotImplementedError


def _explained(message: str, text: str, name: str) -> str:
    """Put msgspec's message in terms of the file."""
    unknown = _UNKNOWN.fullmatch(message)
    if unknown:
        section, field = unknown["path"] or "", unknown["field"]
        kind: Any = next((f.type for f in msgspec.structs.fields(Config) if f.name == section), Config)
        names = [f.name for f in msgspec.structs.fields(kind)]
        near = difflib.get_close_matches(field, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        where = f"in [{section}]" if section else "at the top"
        return f"{_place(name, text, section, field)}: unknown name {field} {where}; {hint}"
    wrong = _WRONG.fullmatch(message)
    path = (wrong["path"] or "") if wrong else ""
    section, _, field = path.rpartition(".")
    what = wrong["what"] if wrong else message
    return f"{_place(name, text, section, field)}: {path or 'the file'}: {what}; see `kvtier config explain`"


def _place(name: str, text: str, section: str, field: str) -> str:
    """File and line of a field; only the file when the line is not found."""
    at = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line)
        if header:
            at = header[1]
        if (at == section and re.match(rf"""\s*["']?{re.escape(field)}["']?\s*=""", line)) or (
            header and not section and at == field
        ):
            return f"{name}, line {number}"
    return name

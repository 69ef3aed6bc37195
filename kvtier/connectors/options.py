"""What a user may say of a connector, in the engine's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from kvtier.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def read(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """Check what a user gave.

    Args:
        kind: a struct with a field for each option.
        given: names and values.
        where: the engine's name of the place where they stand, for people.

    Raises:
        ConfigError: an unknown name, or a value that cannot be.
    """
    known = kind.__struct_fields__
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
            raise ConfigError(f"{where} has no {name!r}; {hint}")
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{where}: {exc}") from exc

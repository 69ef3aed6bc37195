"""Which precision plan a name means."""

from __future__ import annotations

import difflib

from kvtier.errors import ConfigError

NAMED = {"raw": "raw", "int8": "int8/token/sym"}
"""Names for people; keys and headers carry the canonical text."""


def canonical_plan(text: str) -> str:
    """Turn a plan's name, or its canonical text, into the canonical text.

    Raises:
        ConfigError: no such plan; the message names the nearest one.
    """
    if text in NAMED:
        return NAMED[text]
    if text in NAMED.values():
        return text
    valid = [*NAMED, *sorted(set(NAMED.values()) - set(NAMED))]
    near = difflib.get_close_matches(text, valid, 1, 0)
    raise ConfigError(f"no plan {text!r}; did you mean {near[0]!r}? Plans: {', '.join(valid)}")

"""Examples in docstrings, which stand there as at Python's prompt, become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_PROMPT = re.compile(r"(?:^(?:>>>|\.\.\.) .*\n?)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fence them, before the docstring is read as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """See `griffe.Extension`."""
        if obj.docstring:
            obj.docstring.value = _PROMPT.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )

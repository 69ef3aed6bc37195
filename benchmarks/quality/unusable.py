"""Why nothing can be measured."""

from __future__ import annotations


class Unusable(Exception):
    """A model, a text or an option that nothing can be measured with; the message says what to change."""

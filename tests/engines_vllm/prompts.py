"""Prompts, and how many of their tokens a cache may answer for."""

from __future__ import annotations

from collections.abc import Sequence

from tests.engines_vllm.engine import BLOCK, PAGE

LENGTH = 24
"""Tokens that are generated unless a test says otherwise."""


def words(count: int, step: int, first: int = 3) -> list[int]:
    """Tokens that look like text and are no special ones."""
    return [first + (i * step + i * i // 7) % 240 for i in range(count)]


A = words(1000, 7)
B = A[:640] + words(200, 11)
"""Shares 10 blocks with A."""
C = words(333, 13, first=5)
"""Shares nothing."""


def whole(tokens: int, block: int = BLOCK) -> int:
    """Tokens of the whole blocks of so many."""
    return tokens // block * block


def loadable(prompt: Sequence[int], block: int = BLOCK) -> int:
    """Tokens of a prompt that are loaded when all of it is stored: its last one is always computed."""
    return whole(len(prompt) - 1, block)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two sequences begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def local(prompt: Sequence[int], *before: Sequence[int]) -> int:
    """Tokens of a prompt that vLLM finds in its own pool when these sequences are there."""
    return max((whole(min(shared(prompt, one), len(prompt) - 1), PAGE) for one in before), default=0)


def blocks(*sequences: Sequence[int], block: int = BLOCK) -> int:
    """Different whole blocks of sequences."""
    return len({tuple(s[:end]) for s in sequences for end in range(block, len(s) + 1, block)})

"""Request traces, in the form that Mooncake publishes."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvtier.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens that one id stands for."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line.

    Attributes:
        seconds: when it came, from the trace's beginning.
        blocks: ids of the prompt's blocks in prefix order; equal ids, equal prefixes up to there.
    """

    seconds: float
    blocks: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    """Read a trace: a line a request, a JSON object with `timestamp` (ms) and `hash_ids`; unpacked if it is .gz or .xz.

    Raises:
        ConfigError: which line cannot be used, and why.
    """
    requests = []
    try:
        with _open(path) as file:
            for number, line in _lines(file):
                try:
                    requests.append(_request(line))
                except (ValueError, RecursionError) as exc:
                    raise ConfigError(f"{path}, line {number}: {exc}") from exc
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    if not requests:
        raise ConfigError(f"{path} has no requests: a trace has one JSON object a line, with timestamp and hash_ids")
    return requests


def ceiling(trace: Sequence[Request]) -> float:
    """The hit ratio of a cache that forgets nothing."""
    seen: set[int] = set()
    asked = found = 0
    for request in trace:
        asked += len(request.blocks)
        found += next((i for i, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
    return found / asked if asked else 0.0


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _lines(file: IO[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _request(line: str) -> Request:
    """Read one line.

    Raises:
        ValueError: what is wrong with it.
    """
    raw: Any = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError(  # noqa: TRY004 - of what a person wrote
            'it is no JSON object; write {"timestamp": 0, "hash_ids": [0, 1]}'
        )
    for name, kind in (("timestamp", "milliseconds"), ("hash_ids", "a list of block ids")):
        if name not in raw:
            raise ValueError(f"{name} ({kind}) is missing")
    time, blocks = raw["timestamp"], raw["hash_ids"]
    if not isinstance(time, int | float) or isinstance(time, bool) or not 0 <= time < 1e15:
        raise ValueError(f"timestamp is {time!r}; write milliseconds from the trace's beginning")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("hash_ids is no list of integers")
    if len(set(blocks)) != len(blocks):
        raise ValueError("an id is in hash_ids twice; an id names a block and everything before it")
    return Request(time / 1000, tuple(blocks))

"""The names of what can be done, without the libraries that do it."""

from __future__ import annotations

from enum import IntEnum


class Method(IntEnum):
    """What is done with the high plane; STORED is no frame but the payload itself."""

    STORED = 0
    LZ4 = 1
    ZSTD = 2


METHODS: dict[str, Method | None] = {"off": Method.STORED, "auto": None, "lz4": Method.LZ4, "zstd": Method.ZSTD}
"""As people write them; with "auto" it is found out where payloads go through."""

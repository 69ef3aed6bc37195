"""Which method a path is worth.

Packing pays where moving a byte takes longer than packing and unpacking it: on a network of 1 Gbit/s always, on the
fastest NVMe never. Where it begins depends on the machine, so it is measured, on payloads that are to be moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvtier.lossless.frame import Buffer, pack, unpack
from kvtier.lossless.method import Method

MARGIN = 0.05
"""Part of the time, or of the bytes, that a method must save to be chosen: a tie is for leaving bytes alone."""
SLOWER = 1.25
"""How many times as long a read may take where capacity is preferred."""
ROUNDS = 3

Prefer = Literal["speed", "capacity"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A method on a sample.

    Attributes:
        ratio: payload bytes over what they become, frames and payloads that did not shrink taken together.
        pack: payload bytes per second, one thread.
        unpack: payload bytes per second, one thread.
    """

    ratio: float
    pack: float
    unpack: float


@dataclass(frozen=True, slots=True)
class Path:
    """Where payloads go through.

    Attributes:
        bytes_per_second: of the path alone, all threads together.
        threads: that pack or unpack at a time.
        packing: part of the time of packing that a reader waits for: 1 where the sender packs when it is asked, 0 where
            it was done long ago, as on NVMe.
        overlapped: whether other payloads are moved while one is packed or unpacked (many blocks a batch), so that the
            slower of the two decides; else a payload waits for one after the other.
    """

    bytes_per_second: float
    threads: int = 1
    packing: float = 0.0
    overlapped: bool = False

    def seconds(self, measured: Measured | None) -> float:
        """For one byte of payload from one end to the other, as its reader sees it; None is `STORED`."""
        if measured is None:
            return 1 / self.bytes_per_second
        moving = 1 / (measured.ratio * self.bytes_per_second)
        working = (self.packing / measured.pack + 1 / measured.unpack) / self.threads
        return max(moving, working) if self.overlapped else moving + working


def measure(payloads: Sequence[Buffer], clock: Callable[[], float] = time.perf_counter) -> dict[Method, Measured]:
    """Pack and unpack a sample, a few times: milliseconds a megabyte, and memory of twice the largest payload.

    Methods that gain nothing are left out.
    """
    largest = max(map(len, payloads), default=0)
    frame, copy = memoryview(bytearray(largest)), memoryview(bytearray(largest))
    found = ((method, _measured(payloads, method, frame, copy, clock)) for method in (Method.LZ4, Method.ZSTD))
    return {method: one for method, one in found if one is not None}


def choose(measured: Mapping[Method, Measured], path: Path, prefer: Prefer = "speed") -> Method:
    """The method with which payloads are read soonest ("speed"), or smallest without being much later ("capacity").

    "much later" is `SLOWER` times what `STORED` takes; a saving below `MARGIN` is none.
    """
    stored = path.seconds(None)
    took = {method: path.seconds(one) for method, one in measured.items()}
    if prefer == "capacity":
        able = [m for m in took if took[m] <= SLOWER * stored and 1 / measured[m].ratio <= 1 - MARGIN]
        return max(able, key=lambda method: (measured[method].ratio, -method), default=Method.STORED)
    able = [method for method in took if took[method] <= (1 - MARGIN) * stored]
    return min(able, key=lambda method: (took[method], method), default=Method.STORED)


def _measured(
    payloads: Sequence[Buffer], method: Method, frame: memoryview, copy: memoryview, clock: Callable[[], float]
) -> Measured | None:
    """What does not shrink costs its try at packing, and nothing to unpack."""
    total, moved, packing, unpacking = 0, 0, 0.0, 0.0
    for payload in payloads:
        nbytes = pack(payload, method, frame)
        packing += _fastest(partial(pack, payload, method, frame), clock)
        if nbytes is not None:
            unpacking += _fastest(partial(unpack, frame, copy), clock)
        total += len(payload)
        moved += nbytes or len(payload)
    return Measured(total / moved, total / packing, total / unpacking) if moved < total else None


def _fastest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)

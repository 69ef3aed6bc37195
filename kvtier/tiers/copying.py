"""Copies between the arena and the GPU tier's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from kvtier.block import slot_nbytes
from kvtier.memory.pinning import pieces

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Copy:
    """One payload to move.

    Attributes:
        place: of its key in the call.
        key: its address.
        outside, inside: offsets of its slots in the arena and in the tier's memory.
        record: what is known of it.
    """

    place: int
    key: bytes
    outside: int
    inside: int
    record: NDArray[Any]


def runs(copies: Sequence[Copy]) -> Iterator[tuple[int, int, int]]:
    """Whole slots to copy as (outside, inside, bytes): neighbours on both sides go in one.

    None crosses two parts of the arena that are pinned apart.
    """
    joined: list[list[int]] = []
    for outside, inside, nbytes in sorted(
        (copy.outside, copy.inside, slot_nbytes(int(copy.record["nbytes"]))) for copy in copies
    ):
        last = joined[-1] if joined else None
        if last and (last[0] + last[2], last[1] + last[2]) == (outside, inside):
            last[2] += nbytes
        else:
            joined.append([outside, inside, nbytes])
    for outside, inside, nbytes in joined:
        for start, length in pieces(outside, nbytes):
            yield start, inside + start - outside, length


class Copier:
    """Copies batches, each way on a stream of its own, so that reads and writes overlap. Thread-safe.

    Args:
        device: of the tier's memory.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._inward, self._outward = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    def __call__(self, copies: Sequence[Copy], outside: torch.Tensor, inside: torch.Tensor, *, inward: bool) -> None:
        """Copy a batch and wait until it is there: for an event behind it, not for what others queued meanwhile.

        Raises:
            RuntimeError: the device failed. Nothing of the batch is under way any more, unless the device is lost.
        """
        import torch

        stream = self._inward if inward else self._outward
        if stream is None:
            _queue(copies, outside, inside, inward=inward)
            return
        try:
            with torch.cuda.stream(stream):
                _queue(copies, outside, inside, inward=inward)
                done = torch.cuda.Event(blocking=True)
                done.record(stream)
            done.synchronize()
        except RuntimeError:
            with suppress(RuntimeError):
                stream.synchronize()
            raise


def _queue(copies: Sequence[Copy], outside: torch.Tensor, inside: torch.Tensor, *, inward: bool) -> None:
    for start, at, nbytes in runs(copies):
        there, here = outside[start : start + nbytes], inside[at : at + nbytes]
        into, source = (here, there) if inward else (there, here)
        into.copy_(source, non_blocking=True)

"""Page-locking of the arena, so that CUDA copies from and to it at full speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier.memory.arena import Arena, Pin
from kvtier.memory.filling import STEP, Filling

LOOK = 0.1
"""Seconds between looks at how far the owner of an arena is."""
_MAPPED = 2
"""cudaHostRegisterMapped."""


def cuda_present() -> bool:
    """Whether this machine has a CUDA device; cheap, and does not import torch where it has none."""
    if not Path("/proc/driver/nvidia/version").exists():
        return False
    import torch

    return torch.cuda.is_available()


def resolve_device(device: str) -> str:
    """What a configured device ("auto", "off", "cpu", "cuda:N") means on this machine; empty for no GPU tier."""
    if device == "auto":
        return "cuda:0" if cuda_present() else ""
    return "" if device == "off" else device


class Pinner:
    """Page-locks parts of a mapping for CUDA in this process.

    After the first part that could not be, no more are tried: unpinned memory works, slower.

    Attributes:
        fault: why a part could not be; empty when all could, or when there is no CUDA device.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Nothing is pinned yet.

        Args:
            say: told of the fault, once.
        """
        self.fault = ""
        self._say = say

    def __call__(self, memory: NDArray[np.uint8]) -> None:
        """Page-lock one part."""
        if self.fault or not cuda_present():
            return
        self.fault = _register(memory)
        if self.fault:
            self._say(self.fault)


def unpin(memory: NDArray[np.uint8]) -> None:
    """Let go of a part that was page-locked, before its memory is given back."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


def pin_as_it_grows(arena: Arena, pin: Pin) -> Filling:
    """Page-lock an arena that another process owns, in the background and part by part, as far as it has memory."""

    def prepare(start: int, end: int) -> str:
        if end > arena.ready:
            return "the owner has not allocated it yet"
        pin(arena.memory[start:end])
        return ""

    filling = Filling(arena.capacity, prepare, retry=LOOK)
    filling.start()
    return filling


def pieces(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """A range of the arena as (offset, length) of what lies in one pinned part each: one copy of CUDA's must not cross.

    CUDA refuses a copy whose host memory is not in one registration (`CUDA_ERROR_INVALID_VALUE`).
    """
    end = offset + nbytes
    while offset < end:
        length = min(end, (offset // STEP + 1) * STEP) - offset
        yield offset, length
        offset += length


def _register(memory: NDArray[np.uint8]) -> str:
    """Why the memory could not be page-locked; empty when it is."""
    import torch

    try:
        code = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _MAPPED))
    except RuntimeError as exc:
        return f"cudaHostRegister failed: {exc}; copies to the GPU are slower"
    if code == 0:
        return ""
    return f"cudaHostRegister answered {code}; raise the memlock limit (ulimit -l) for faster copies"

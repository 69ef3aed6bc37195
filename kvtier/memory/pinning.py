"""Page-locking of the arena, so that CUDA copies from and to it at full speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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


def pin(memory: NDArray[np.uint8]) -> str:
    """Page-lock a mapping for CUDA in this process.

    Returns:
        Why it could not be done; empty when it was, or when there is no CUDA device. Unpinned memory works, slower.
    """
    if not cuda_present():
        return ""
    import torch

    code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _MAPPED)
    if int(code) == 0:
        return ""
    return f"cudaHostRegister answered {code}; raise the memlock limit (ulimit -l) for faster copies"

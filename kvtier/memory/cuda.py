"""Memory of a GPU that another process can open: what torch has no calls for.

Through the driver (`libcuda`) and its own allocations, not torch's: torch's allocator cuts many tensors out of one
allocation, of which a handle exposes all, and with expandable segments it has none that a handle can name; its sharing
(`UntypedStorage._share_cuda_`) keeps count of readers in files of a multiprocessing that both sides must run, and its
handles are of one torch version. What the driver gives is 64 bytes that open in any process on the same GPU.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flags that there are."""


class CudaRefused(RuntimeError):
    """The driver did not do what it was asked for; says why in its own words."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Allocation:
    """Device memory of this process, until the last tensor over it is gone; `torch.as_tensor` looks at it in place."""

    def __init__(self, address: int, nbytes: int, device: torch.device, release: str) -> None:
        self._address, self._device, self._release = address, device, release
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        # At the end of a process the driver may be gone, and has taken the memory along.
        with suppress(Exception):
            _call(self._device, self._release, ctypes.c_uint64(self._address))


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of its own, u8, not cleared.

    Raises:
        CudaRefused: there is not so much.
    """
    address = ctypes.c_uint64()
    _call(device, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    return _tensor(_Allocation(address.value, nbytes, device, "cuMemFree_v2"), device)


def export(memory: torch.Tensor) -> bytes:
    """The handle by which another process opens what `allocate` gave.

    Raises:
        CudaRefused: this driver, or this kind of virtual GPU, has no handles.
    """
    handle = _Handle()
    _call(memory.device, "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(memory.data_ptr()))
    return bytes(handle)


def open_exported(handle: bytes, nbytes: int, device: torch.device) -> torch.Tensor:
    """The memory behind another process's handle, u8.

    Raises:
        CudaRefused: it cannot be opened here: of another GPU or container, of this very process, or gone.
    """
    address = ctypes.c_uint64()
    where = ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
    _call(device, "cuIpcOpenMemHandle_v2", *where)
    return _tensor(_Allocation(address.value, nbytes, device, "cuIpcCloseMemHandle"), device)


def uuid(device: torch.device) -> str:
    """What tells this GPU from all others, in every process and container."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _tensor(allocation: _Allocation, device: torch.device) -> torch.Tensor:
    import torch

    return torch.as_tensor(allocation, device=device)


def _call(device: torch.device, name: str, *arguments: Any) -> None:
    """Call the driver in the context that torch uses on this device.

    Raises:
        CudaRefused: it answered with an error.
    """
    import torch

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the context, and makes it this thread's
        code = getattr(_driver(), name)(*arguments)
    if code:
        raise CudaRefused(f"{name.partition('_')[0]} answered {_name_of(code)}")


def _name_of(code: int) -> str:
    name = ctypes.c_char_p()
    if _driver().cuGetErrorName(code, ctypes.byref(name)) or not name.value:
        return f"error {code}"
    return name.value.decode()


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        raise CudaRefused(f"the CUDA driver cannot be loaded: {exc}") from exc
    driver.cuIpcOpenMemHandle_v2.argtypes = ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint
    return driver

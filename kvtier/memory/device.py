"""Memory of the GPU tier, which an engine on the same GPU may read in place.

    DeviceArena     what the tier's process owns
    share, attach   a handle, and what another process makes of it
    DeviceMemory    the memory as a reader sees it

A handle is bytes that say everything: the GPU's UUID, the size, the epoch, the driver's IPC handle, and where the
generations are: a file of one word a page beside the host's arena, which only the tier's process writes. Where the
device is emulated ("cpu") the memory is a file too, so that the whole way is the same.

As in the arena, a page's generation moves on before its slot is granted again, so that a reader who compares it after
its copy knows whose bytes these were. Each life of the tier's process has memory of its own, under an epoch of its own:
the file of the life before is marked before the first slot of the new one is granted. A reader's mapping should
outlive the process that made it, so that a late reader reads old bytes, never unmapped ones, and `current` then tells
it so. For the emulation the kernel sees to that. For CUDA it is assumed, not promised: a process must not free what
others have open, and one that is killed does not ask. `tests/gpu/run.sh` tries it on the hardware.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE, slot_nbytes
from kvtier.config.machine import mib
from kvtier.errors import ConfigError
from kvtier.memory import cuda, limits

if TYPE_CHECKING:
    import torch

MEMORY, TABLE = "device", "device.table"
"""Names of the files in the arena's folder: the memory, where it is emulated, and the generations."""
_HEAD = struct.Struct("<8sQ")
"""Magic and epoch; the epoch is 0 when the memory is nobody's any more."""
_MAGIC = b"KVDEVIC1"


class _Handle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `share` says: where memory and generations are, with the inodes of the files."""

    device: str
    nbytes: int
    epoch: int
    folder: str = ""
    table: int = 0
    memory: int = 0
    ipc: bytes = b""
    unshared: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory:
    """The GPU tier's memory, to read.

    Attributes:
        epoch: of its owner.
        device: "cpu" when it is emulated, else "cuda:N".
        memory: u8: an array when it is emulated, else a tensor.
        generations: u32 for each page, live.
        head: live, of the generations' file.
    """

    epoch: int
    device: str
    memory: Any
    generations: NDArray[np.uint32]
    head: NDArray[np.uint64]

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return int(self.memory.nbytes)

    @property
    def current(self) -> bool:
        """Whether its owner has not let go of it."""
        return int(self.head[1]) == self.epoch


class DeviceArena:
    """The memory of one GPU tier, cleared, with its generations. One for each folder at a time: the caller's care.

    Args:
        capacity: bytes, a multiple of 4096.
        device: a CUDA device, or "cpu" to emulate one in host memory.
        folder: of the host's arena; None for memory that only this process can read.

    Attributes:
        epoch: says which life this is; never 0.
        memory: u8 tensor.
        generations: u32 for each page.

    Raises:
        ConfigError: there is no room for it.
    """

    def __init__(self, capacity: int, device: torch.device, folder: Path | None) -> None:
        self.epoch = secrets.randbits(62) | 1
        self._folder, self._device, self._nbytes = folder, device, capacity
        self._inode = 0
        if folder is not None:
            _void(folder)
        self.memory = self._allocate()
        table = self._table()
        self._head, self.generations = table[: _HEAD.size].view(np.uint64), table[PAGE:].view(np.uint32)
        self.generations[:] = secrets.randbits(32)
        self._head[1] = self.epoch
        self._handle = msgspec.msgpack.encode(self._describe())
        _mine[self.epoch] = self

    def renew(self, offset: int, nbytes: int) -> int:
        """Move the generations of a slot's pages on, before it is granted; returns the first."""
        first = offset // PAGE
        pages = self.generations[first : first + slot_nbytes(nbytes) // PAGE]
        pages += np.uint32(1)
        return int(pages[0])

    def share(self) -> bytes:
        """The handle."""
        return self._handle

    def view(self) -> DeviceMemory:
        """The memory as readers in this process see it."""
        memory = _frozen(self.memory.numpy()) if self._device.type == "cpu" else self.memory
        generations, head = _frozen(self.generations), _frozen(self._head)
        return DeviceMemory(self.epoch, str(self._device), memory, generations, head)

    def close(self) -> None:
        """Say that it is nobody's, and let go of it; idempotent."""
        self._head[1] = 0
        self.memory = self.memory.new_empty(0)
        if self._folder is not None and _inode(self._folder / TABLE) == self._inode:
            for name in (MEMORY, TABLE):
                (self._folder / name).unlink(missing_ok=True)

    def _allocate(self) -> torch.Tensor:
        import torch

        try:
            if self._device.type == "cuda":
                memory = cuda.allocate(self._nbytes, self._device)
            elif self._folder is None:
                memory = torch.empty(self._nbytes, dtype=torch.uint8)
            else:
                memory = torch.from_numpy(_create(self._folder, MEMORY, self._nbytes))
            memory.zero_()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except (RuntimeError, OSError) as exc:
            raise ConfigError(
                f"{self._device} has no room for a GPU tier of {self._nbytes} bytes ({exc}); set gpu.capacity lower"
            ) from exc
        return memory

    def _table(self) -> NDArray[np.uint8]:
        nbytes = PAGE + self._nbytes // PAGE * 4
        if self._folder is None:
            table = np.zeros(nbytes, np.uint8)
        else:
            try:
                table = _create(self._folder, TABLE, nbytes)
            except OSError as exc:
                raise ConfigError(f"{self._folder} has no room for the GPU tier's table: {exc.strerror}") from exc
            self._inode = _inode(self._folder / TABLE)
        table[: _HEAD.size] = np.frombuffer(_HEAD.pack(_MAGIC, 0), np.uint8)
        return table

    def _describe(self) -> _Handle:
        folder, ipc, unshared = self._folder, b"", ""
        cpu = self._device.type == "cpu"
        if folder is None:
            unshared = "it is memory of another process alone"
        elif not cpu:
            try:
                ipc = cuda.export(self.memory)
            except RuntimeError as exc:
                unshared = f"the GPU tier's process cannot share it: {exc}"
        return _Handle(
            device="cpu" if cpu else cuda.uuid(self._device),
            nbytes=self._nbytes,
            epoch=self.epoch,
            folder="" if folder is None else str(folder),
            table=self._inode,
            memory=_inode(folder / MEMORY) if folder is not None and cpu else 0,
            ipc=ipc,
            unshared=unshared,
        )


_mine: WeakValueDictionary[int, DeviceArena] = WeakValueDictionary()
"""Of this process, which can read them as they are."""


def attach(handle: bytes, device: str) -> DeviceMemory | str:
    """Open the memory behind a handle, for KV that lies on `device`; or why it cannot be.

    Why is empty when there is nothing to open: one of the two is in CPU memory and the other on a GPU.

    Args:
        handle: of `DeviceArena.share`.
        device: where the reader's KV is: "cpu" or "cuda:N".
    """
    try:
        said = msgspec.msgpack.decode(handle, type=_Handle)
        if (said.device == "cpu") != (device == "cpu"):
            return ""
        here = "cpu" if device == "cpu" else _uuid(device)
        if said.device != here:
            return f"the GPU tier is on GPU {said.device}, and the KV on GPU {here}"
        own = _mine.get(said.epoch)
        if own is not None:
            return own.view()
        return said.unshared or _open(said, device)
    except (msgspec.MsgspecError, RuntimeError, OSError, ValueError) as exc:
        return " ".join(str(exc).split()) or type(exc).__name__


def _open(said: _Handle, device: str) -> DeviceMemory | str:
    folder = Path(said.folder)
    table = _map(folder / TABLE, PAGE + said.nbytes // PAGE * 4, said.table)
    if table is None:
        return f"{folder / TABLE} is not here (another container?), or of another life of the GPU tier"
    head, generations = table[: _HEAD.size].view(np.uint64), table[PAGE:].view(np.uint32)
    memory: Any
    if device == "cpu":
        memory = _map(folder / MEMORY, said.nbytes, said.memory)
        if memory is None:
            return f"{folder / MEMORY} is not here, or of another life of the GPU tier"
    else:
        import torch

        memory = cuda.open_exported(said.ipc, said.nbytes, torch.device(device))
    opened = DeviceMemory(said.epoch, device, memory, generations, head)
    return opened if opened.current else "the GPU tier's process has ended"


def _uuid(device: str) -> str:
    import torch

    return cuda.uuid(torch.device(device))


def _void(folder: Path) -> None:
    """The memory of an earlier life is nobody's any more: say so to those who still read it."""
    path = folder / TABLE
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(fd, _HEAD.pack(_MAGIC, 0), 0)
        finally:
            os.close(fd)
    for name in (MEMORY, TABLE):
        (folder / name).unlink(missing_ok=True)


def _create(folder: Path, name: str, nbytes: int) -> NDArray[np.uint8]:
    """A file with all its memory, which may be read by whoever may read the arena."""
    left = limits.room(folder).nbytes
    if nbytes > left:
        raise OSError(0, f"{folder} has {mib(left)} free")
    access = (folder / "arena").stat()
    fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, access.st_mode & 0o666)
    try:
        os.fchown(fd, -1, access.st_gid)
        os.fchmod(fd, access.st_mode & 0o666)
        os.posix_fallocate(fd, 0, nbytes)
        return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    finally:
        os.close(fd)


def _map(path: Path, nbytes: int, inode: int) -> NDArray[np.uint8] | None:
    """A file, read-only; None when it is not there, or not the one with this inode."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino == inode:
                return np.frombuffer(mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(fd)
    return None


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory, which cannot be written to through it."""
    view = array.view()
    view.flags.writeable = False
    return view


def _inode(path: Path) -> int:
    """0 when there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0

"""The GPU tier: slots of one preallocated tensor."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtier.block import ADDRESS_NBYTES, PAGE, slot_nbytes
from kvtier.errors import ClosedError, ConfigError
from kvtier.memory.arena import Arena
from kvtier.memory.device import DeviceArena
from kvtier.memory.pool import SlotPool
from kvtier.tiers.base import STORED, Inventory, Slots, TierUsage, stored
from kvtier.tiers.copying import Copier, Copy
from kvtier.tiers.shared import PLACE, Places

if TYPE_CHECKING:
    import torch


class GpuTier:
    """Payloads in one preallocated tensor, copied from and to arena slots; a `SharedTier`.

    It never evicts: it refuses when its pool has no room, and the caller removes victims first. So whoever reads a slot
    in place is safe as long as the caller does not remove its key.

    Args:
        capacity: bytes of the tensor.
        arena: where the slots are; page-locked by the caller if copies shall run at full speed.
        device: a CUDA device, or "cpu" to emulate one in host memory.

    Attributes:
        label: "gpu", or "gpu(host)" for the emulation; figures carry it.

    Raises:
        ConfigError: there is no such device, or not so much memory on it.
    """

    name = "gpu"

    def __init__(self, capacity: int, arena: Arena, device: str = "cuda:0") -> None:
        import torch

        self.label = "gpu(host)" if device == "cpu" else "gpu"
        self._pool = SlotPool(capacity)
        self._capacity = capacity
        self._device = _device(device)
        self._arena = arena
        self._outside = torch.from_numpy(arena.memory)
        self._memory = DeviceArena(self._pool.capacity, self._device, arena.folder)
        self._copier = Copier(self._device)
        self._lock = threading.Lock()
        """Guards all that follows; never held while payloads are copied."""
        self._idle = threading.Condition(self._lock)
        self._blocks: dict[bytes, tuple[int, NDArray[Any]]] = {}
        self._copying = 0
        self._counters: Counter[str] = Counter()
        self._fault = ""
        self._closed = False

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        with self._lock:
            self._check_open()
            copies = self._allocate(keys, slots)
            self._copying += 1
        copied = self._copy(copies, inward=True)
        with self._lock:
            for copy in copies:
                if copied and copy.key not in self._blocks:
                    self._blocks[copy.key] = copy.inside, copy.record
                else:
                    self._release([copy.inside])
            self._copied()
            return [key in self._blocks for key in keys]

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        answers = [False] * len(keys)
        with self._lock:
            self._check_open()
            copies = self._retain(keys, slots)
            self._copying += 1
        copied = self._copy(copies, inward=False)
        for copy in copies:
            answers[copy.place] = copied
        with self._lock:
            for copy in copies:
                self._release([copy.inside])
            self._copied()
        return answers

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._check_open()
            self._release([found[0] for key in keys if (found := self._blocks.pop(key, None))])

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key in self._blocks for key in keys]

    def inventory(self) -> Inventory:
        with self._lock:
            self._check_open()
            records = [record for _, record in self._blocks.values()]
            return Inventory(list(self._blocks), np.array(records, STORED))

    def dropped(self) -> list[bytes]:
        with self._lock:
            self._check_open()
            return []

    @property
    def epoch(self) -> int:
        return 0 if self._closed else self._memory.epoch

    def share(self) -> bytes:
        return b"" if self._closed else self._memory.share()

    def places(self, keys: Sequence[bytes]) -> Places:
        slots = np.zeros(len(keys), PLACE)
        with self._lock:
            self._check_open()
            offsets = [self._blocks[key][0] if key in self._blocks else -1 for key in keys]
            slots["offset"] = offsets
            slots["generation"] = self._memory.generations[np.maximum(slots["offset"], 0) // PAGE]
        return Places(self._memory.epoch, slots)

    def usage(self) -> TierUsage:
        with self._lock:
            self._check_open()
            return TierUsage(self._capacity, self._pool.used, len(self._blocks), self._fault, dict(self._counters))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._idle.wait_for(lambda: not self._copying)
            self._blocks.clear()
            self._memory.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the GPU tier was closed")

    def _allocate(self, keys: Sequence[bytes], slots: Slots) -> list[Copy]:
        """Room for what is not stored yet, as far as there is some."""
        copies: dict[bytes, Copy] = {}
        for place, (key, outside, nbytes) in enumerate(zip(keys, *_lists(slots), strict=True)):
            if key in self._blocks or key in copies or not self._is_slot(key, outside, nbytes):
                continue
            inside = self._pool.allocate(nbytes)
            if inside is None:
                self._counters["refused"] += 1
            else:
                self._memory.renew(inside, nbytes)
                payload = self._arena.payload(outside, nbytes)
                copies[key] = Copy(place, key, outside, inside, stored(payload, nbytes))
        return list(copies.values())

    def _retain(self, keys: Sequence[bytes], slots: Slots) -> list[Copy]:
        """What is stored in the size asked for; it stays in place until it is released, even when it is removed."""
        copies = []
        for place, (key, outside, nbytes) in enumerate(zip(keys, *_lists(slots), strict=True)):
            found = self._blocks.get(key)
            if found and found[1]["nbytes"] == nbytes and self._is_slot(key, outside, nbytes):
                self._pool.retain(np.array([found[0]]))
                copies.append(Copy(place, key, outside, *found))
        return copies

    def _is_slot(self, key: bytes, outside: int, nbytes: int) -> bool:
        end = outside + slot_nbytes(nbytes)
        return len(key) == ADDRESS_NBYTES and outside % PAGE == 0 and 0 <= outside < end <= len(self._outside)

    def _copy(self, copies: Sequence[Copy], *, inward: bool) -> bool:
        """Copy all of a batch and wait once; False when the device failed, and then nothing of it counts."""
        try:
            self._copier(copies, self._outside, self._memory.memory, inward=inward)
        except RuntimeError as exc:
            self._failed(exc, inward=inward)
            return False
        self._fault = ""
        return True

    def _failed(self, exc: RuntimeError, *, inward: bool) -> None:
        with self._lock:
            self._counters["write_error" if inward else "read_error"] += 1
            self._fault = f"copying {'to' if inward else 'from'} {self._device} failed: {exc}"

    def _release(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            self._pool.release(np.array([offset]))

    def _copied(self) -> None:
        self._copying -= 1
        self._idle.notify_all()


def _lists(slots: Slots) -> tuple[list[int], list[int]]:
    return slots.offsets.tolist(), slots.nbytes.tolist()


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"gpu.device is {name!r}; set it to cuda:0, another CUDA device, or cpu") from exc
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if not torch.cuda.is_available() or (device.index or 0) >= count:
        raise ConfigError(
            f"this process has no device {name} ({count} CUDA devices): set gpu.device to one that is there, or to "
            '"cpu" to emulate a GPU tier in host memory, or to "off"'
        )
    return torch.device("cuda", device.index or 0)

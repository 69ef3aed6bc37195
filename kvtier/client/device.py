"""The GPU tier's memory, as one client has it attached."""

from __future__ import annotations

import threading
from collections import Counter

from kvtier.client.session import Session
from kvtier.errors import SessionError
from kvtier.memory.device import DeviceMemory


class Device:
    """Attaches the GPU tier's memory when KV is loaded on its device for the first time. Thread-safe.

    A client that never loads there never opens it. What cannot be attached is not tried again until the GPU tier's
    process begins anew; all loads come out of the arena then.

    Attributes:
        memory: what is attached; None for nothing.
        refused: why nothing is, of the last attempt; empty when it worked, or was never tried.
    """

    def __init__(self, session: Session, counters: Counter[str]) -> None:
        self.memory: DeviceMemory | None = None
        self.refused = ""
        self._session, self._counters = session, counters
        self._tried: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        if self.memory is not None and self.epoch:
            return f"attached on {self.memory.device}"
        return f"refused: {self.refused}" if self.refused else "not attached"

    @property
    def epoch(self) -> int:
        """Of what is attached and still its owner's; 0 for nothing."""
        return self.memory.epoch if self.memory is not None and self.memory.current else 0

    def meet(self, device: str, epoch: int) -> None:
        """KV was loaded on a device, and the host says that memory of this epoch can be attached."""
        if not epoch or (device, epoch) in self._tried:
            return
        with self._lock:
            if (device, epoch) in self._tried or self.epoch == epoch:
                return
            try:
                attached = self._session.attach(device)
            except SessionError as exc:
                self._counters[f"device_{type(exc).__name__}"] += 1
                return
            self._tried.add((device, epoch))
            if not isinstance(attached, str):
                self.memory, self.refused = attached, ""
            elif attached:
                self.refused = attached
                self._counters["device_refused"] += 1

"""The NVMe tier against a dict, with crashes at any byte."""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.lossless.method import Method
from kvtier.memory.arena import Arena
from kvtier.testing import payloads, tier
from kvtier.testing.payloads import key_of
from kvtier.testing.tier import Desk
from kvtier.tiers.nvme import NvmeTier, log, transfer, writer
from kvtier.tiers.nvme.health import PAUSE
from kvtier.tiers.nvme.io import Disk
from kvtier.tiers.nvme.recovery import FILE

CAPACITY = 512 << 10
SIZES = (192, 5000, 12_000, 30_000)
SEEDS = st.integers(0, 40)
LEFT = st.integers(0, 200_000)


def payload_of(seed: int, nbytes: int) -> bytes:
    """Two of three can be packed."""
    return payloads.payload_of(seed, nbytes) if seed % 3 == 0 else payloads.normal_payload_of(seed, nbytes)


class Torn(Exception):
    """The process died here."""


class CrashingDisk(Disk):
    """Dies in a write, after some of its bytes, or fails there; either way nothing is written after that."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.error: Exception = Torn()

    def pwritev(self, fd, buffers, offset):
        if self.left is None:
            return super().pwritev(fd, buffers, offset)
        whole = b"".join(buffers)
        now, self.left = min(self.left, len(whole)), max(0, self.left - len(whole))
        aligned = now // 4096 * 4096
        if aligned:
            super().pwritev(fd, [_aligned(whole[:aligned])], offset)
        if now < len(whole):
            raise self.error
        return now

    @contextmanager
    def dying(self, left: int, error: Exception):
        """From some bytes on nothing is written any more."""
        self.left, self.error = left, error
        try:
            yield
        finally:
            self.left = None


def _aligned(content: bytes) -> memoryview:
    memory = Arena.private(len(content)).payload(0, len(content))
    memory[:] = content
    return memory


class NvmeMachine(RuleBasedStateMachine):
    """`stored` must be there, and `maybe` may be too: what a crash or a fault met. Nothing else may.

    When the file was damaged behind the tier's back, what was `stored` in it ever may be there too; and not all that is
    claimed need be whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.arena = Arena.private(2 << 20)
        self.disk = CrashingDisk()
        self.stored: set[int] = set()
        self.maybe: set[int] = set()
        self.ever: set[int] = set()
        self.damaged = False
        self.now = 0.0

    @initialize(
        direct=st.booleans(),
        damaging=st.booleans(),
        nbytes=st.sampled_from([8 << 10, 20 << 10, 4 << 20]),
        method=st.sampled_from(Method),
    )
    def open(self, direct, damaging, nbytes, method):
        """With small transfers a batch is many calls on several threads, with large ones a single call."""
        self.direct, self.damaging, self.method = direct, damaging, method
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(tier, "payload_of", payload_of)
        self.patch.setattr(transfer, "TRANSFER", nbytes)
        self.patch.setattr(writer, "CARRY", nbytes)
        self.patch.setattr(writer, "UNTABLED", 2)
        self.patch.setattr(log, "REMOVED_AT_A_TIME", 3)
        self.desk = Desk(self._open(), self.arena, sizes={seed: SIZES[seed % len(SIZES)] for seed in range(41)})

    def teardown(self):
        self.desk.tier.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    @rule(seeds=st.lists(SEEDS, max_size=24, unique=True), size=st.sampled_from(SIZES))
    def write(self, seeds, size):
        seeds = self._batch(seeds, size)
        said = self.desk.write(seeds, size)
        self.stored |= set(seeds)
        self._hear_drops()
        assert said == [seed in self.stored for seed in seeds], "a batch may evict what it found stored, nothing else"

    @rule(seeds=st.lists(SEEDS, max_size=12))
    def read(self, seeds):
        for seed, found in zip(seeds, self.desk.read(seeds), strict=True):
            assert found == (seed in self.stored)

    @rule(seeds=st.lists(SEEDS, max_size=6))
    def remove(self, seeds):
        self.desk.tier.remove([key_of(seed) for seed in seeds])
        self.stored -= set(seeds)
        self._hear_drops()
        self.maybe -= set(seeds)

    @rule(method=st.sampled_from(Method))
    def reopen(self, method):
        self.method = method
        before = list(self.desk.tier.inventory().nbytes.items())
        self.desk.tier.close()
        self._recover()
        assert [one for one in self.desk.tier.inventory().nbytes.items() if one in before] == before

    @rule(seeds=st.lists(SEEDS, min_size=1, max_size=24, unique=True), size=st.sampled_from(SIZES), left=LEFT)
    def crash_while_writing(self, seeds, size, left):
        seeds = self._batch(seeds, size)
        said = [False] * len(seeds)
        with self.disk.dying(left, Torn()):
            with suppress(Torn):
                said = self.desk.write(seeds, size)
            self.maybe |= set(seeds)
            self.stored |= {seed for seed, one in zip(seeds, said, strict=True) if one}
            self._die()
        self._recover()

    @rule(seeds=st.lists(SEEDS, max_size=8), left=st.integers(0, 12_000))
    def crash_while_removing(self, seeds, left):
        with self.disk.dying(left, Torn()):
            with suppress(Torn):
                self.desk.tier.remove([key_of(seed) for seed in seeds])
            self.maybe |= set(seeds) & self.stored
            self.stored -= set(seeds)
            self._die()
        self._recover()

    @rule(left=st.integers(0, 12_000))
    def crash_while_closing(self, left):
        with self.disk.dying(left, Torn()):
            self._die()
        self._recover()

    @rule(seeds=st.lists(SEEDS, min_size=1, max_size=24, unique=True), size=st.sampled_from(SIZES), left=LEFT)
    def fail_while_writing(self, seeds, size, left):
        """What was refused may be whole on the disk, until the device works again."""
        seeds = self._batch(seeds, size)
        with self.disk.dying(left, OSError(errno.EIO, "bad place")):
            said = self.desk.write(seeds, size)
        self.stored |= {seed for seed, one in zip(seeds, said, strict=True) if one}
        self._hear_drops()
        self.maybe |= set(seeds)

    @rule(seeds=st.lists(SEEDS, max_size=8), left=st.integers(0, 12_000))
    def fail_while_removing(self, seeds, left):
        with self.disk.dying(left, OSError(errno.EIO, "bad place")):
            self.desk.tier.remove([key_of(seed) for seed in seeds])
        self.maybe |= set(seeds) & self.stored
        self.stored -= set(seeds)
        self._hear_drops()
        assert not any(self.desk.contains(seeds))

    @precondition(lambda self: self.damaging)
    @rule(at=st.floats(0, 1, exclude_max=True), junk=st.binary(min_size=1, max_size=64))
    def garble(self, at, junk):
        """Bytes of the file change while it is open: what they hit is a miss, the rest is untouched."""
        place = 4096 + int(at * (CAPACITY // 2))
        with (self.folder / FILE).open("r+b") as file:
            file.seek(place)
            file.write(junk)
        readable = {seed for seed in sorted(self.stored) if self.desk.read([seed]) == [True]}
        assert len(self.stored - readable) <= 2
        self._hear_drops()
        self.stored = readable
        self.desk.tier.close()
        self._recover(damaged=True)

    @precondition(lambda self: self.damaging)
    @rule(at=st.floats(0, 1))
    def truncate(self, at):
        self.desk.tier.close()
        path = self.folder / FILE
        with path.open("r+b") as file:
            file.truncate(int(at * path.stat().st_size))
        self._recover(damaged=True)

    @invariant()
    def time_passes(self):
        """So that a device that failed is tried again."""
        self.now += 2 * PAUSE
        self.ever |= self.stored

    @invariant()
    def within_capacity(self):
        usage = self.desk.tier.usage()
        assert usage.used <= usage.capacity
        assert (self.folder / FILE).stat().st_size <= CAPACITY

    @precondition(lambda self: self.stored)
    @invariant()
    def all_found(self):
        assert {key_of(seed) for seed in self.stored} == set(self.desk.tier.inventory().keys)

    def _batch(self, seeds, size):
        """Of one size, and at most 6, so that no batch is larger than the tier."""
        return [seed for seed in seeds if self.desk.sizes[seed] == size][:6]

    def _hear_drops(self):
        gone = {key_of(seed): seed for seed in range(41)}
        self.stored -= {gone[key] for key in self.desk.tier.dropped()}

    def _open(self) -> NvmeTier:
        return NvmeTier(
            self.folder,
            CAPACITY,
            self.arena,
            disk=self.disk,
            direct=self.direct,
            lossless=self.method,
            clock=lambda: self.now,
        )

    def _die(self):
        """What the tier had evicted it had overwritten."""
        self._hear_drops()
        with suppress(Torn):
            self.desk.tier.close()

    def _recover(self, *, damaged: bool = False):
        self.desk.tier = self._open()
        everything = range(41)
        claimed = {seed for seed, held in zip(everything, self.desk.contains(everything), strict=True) if held}
        found = {seed for seed in everything if self.desk.read([seed]) == [True]}
        self.damaged |= damaged
        assert self.damaged or claimed == found
        assert damaged or self.stored <= found
        assert found <= self.stored | self.maybe | (self.ever if self.damaged else set())
        self.desk.tier.dropped()
        self.maybe = self.maybe if self.damaged else set()
        self.stored = found


TestNvme = NvmeMachine.TestCase
TestNvme.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

"""The NVMe tier against a dict, with crashes at any byte."""

from __future__ import annotations

import shutil
import tempfile
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
from kvtier.tiers.nvme import NvmeTier, transfer
from kvtier.tiers.nvme.io import Disk
from kvtier.tiers.nvme.recovery import FILE

CAPACITY = 512 << 10
SIZES = (192, 5000, 12_000, 30_000)
SEEDS = st.integers(0, 40)


def payload_of(seed: int, nbytes: int) -> bytes:
    """Two of three can be packed."""
    return payloads.payload_of(seed, nbytes) if seed % 3 == 0 else payloads.normal_payload_of(seed, nbytes)


class Torn(Exception):
    """The process died here."""


class CrashingDisk(Disk):
    """Dies in a write, after some of its bytes; like a process, it writes no more after that."""

    def __init__(self) -> None:
        self.left: int | None = None

    def pwritev(self, fd, buffers, offset):
        if self.left is None:
            return super().pwritev(fd, buffers, offset)
        whole = b"".join(buffers)
        now, self.left = min(self.left, len(whole)), max(0, self.left - len(whole))
        aligned = now // 4096 * 4096
        if aligned:
            super().pwritev(fd, [_aligned(whole[:aligned])], offset)
        if now < len(whole):
            raise Torn
        return now


def _aligned(content: bytes) -> memoryview:
    memory = Arena.private(len(content)).payload(0, len(content))
    memory[:] = content
    return memory


class NvmeMachine(RuleBasedStateMachine):
    """`stored` is what must be there; `maybe` may be there too (removed, dropped or torn, then found on the disk).

    Whatever is claimed after reopening is there, unless the file was ever damaged behind the tier's back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.arena = Arena.private(2 << 20)
        self.disk = CrashingDisk()
        self.stored: set[int] = set()
        self.maybe: set[int] = set()
        self.damaged = False

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
        self.desk = Desk(self._open(), self.arena, sizes={seed: SIZES[seed % len(SIZES)] for seed in range(41)})

    def teardown(self):
        self.desk.tier.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    @rule(seeds=st.lists(SEEDS, max_size=24, unique=True), size=st.sampled_from(SIZES))
    def write(self, seeds, size):
        """At most 6, so that no batch is larger than the tier."""
        seeds = [seed for seed in seeds if self.desk.sizes[seed] == size][:6]
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
        self.maybe |= self.stored & set(seeds)
        self.stored -= set(seeds)

    @rule(method=st.sampled_from(Method))
    def reopen(self, method):
        self.method = method
        before = list(self.desk.tier.inventory().nbytes.items())
        self.desk.tier.close()
        self._recover()
        assert [one for one in self.desk.tier.inventory().nbytes.items() if one in before] == before

    @rule(
        seeds=st.lists(SEEDS, min_size=1, max_size=24, unique=True),
        size=st.sampled_from(SIZES),
        left=st.integers(0, 200_000),
    )
    def crash_while_writing(self, seeds, size, left):
        seeds = [seed for seed in seeds if self.desk.sizes[seed] == size][:6]
        self.disk.left = left
        try:
            said = self.desk.write(seeds, size)
        except Torn:
            said = [False] * len(seeds)
        self.disk.left = None
        self.maybe |= set(seeds)
        self.stored |= {seed for seed, one in zip(seeds, said, strict=True) if one}
        self._hear_drops()
        self.desk.tier.close()
        self._recover()

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
    def within_capacity(self):
        usage = self.desk.tier.usage()
        assert usage.used <= usage.capacity
        assert (self.folder / FILE).stat().st_size <= CAPACITY

    @precondition(lambda self: self.stored)
    @invariant()
    def all_found(self):
        held = set(self.desk.tier.inventory().keys)
        assert {key_of(seed) for seed in self.stored} == held

    def _hear_drops(self):
        gone = {key_of(seed): seed for seed in range(41)}
        dropped = {gone[key] for key in self.desk.tier.dropped()}
        self.stored -= dropped
        self.maybe |= dropped

    def _open(self) -> NvmeTier:
        return NvmeTier(self.folder, CAPACITY, self.arena, disk=self.disk, direct=self.direct, lossless=self.method)

    def _recover(self, *, damaged: bool = False):
        self.desk.tier = self._open()
        everything = range(41)
        claimed = {seed for seed, held in zip(everything, self.desk.contains(everything), strict=True) if held}
        found = {seed for seed in everything if self.desk.read([seed]) == [True]}
        self.damaged |= damaged
        assert self.damaged or claimed == found
        assert damaged or self.stored <= found
        assert found <= self.stored | self.maybe
        self.desk.tier.dropped()
        self.maybe |= self.stored
        self.stored = found


TestNvme = NvmeMachine.TestCase
TestNvme.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

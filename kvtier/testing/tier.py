"""The laws of `kvtier.tiers.base.Tier`, as tests that any tier can be put to.

class TestMyTier(TierKit):
    @pytest.fixture
    def make_tier(self, tmp_path):
        return lambda arena, capacity: MyTier(tmp_path, capacity, arena)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvtier.block import PAGE, BlockHeader, slot_nbytes
from kvtier.errors import ClosedError
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.base import Slots, Tier

MakeTier = Callable[[Arena, int], Tier]
SIZES = (192, 4096, 5000, 40_000, 65_536 + 192)
"""Payloads smaller than a page, of exactly one, and with and without a rest."""


def on_disk(folder: Path) -> int:
    """Bytes that a folder takes on the disk, itself included, but for what a tier has set aside."""
    paths = [path for path in (folder, *folder.rglob("*")) if ".aside-" not in path.name]
    return sum(path.stat().st_blocks * 512 for path in paths)


@dataclass
class Desk:
    """A tier with an arena, worked by payload seeds instead of slots.

    Every read goes into slots full of other bytes and is compared with what the seed says: no test can overlook a wrong
    byte. Each thread of a test needs its own desk, with its own part of the arena.
    """

    tier: Tier
    arena: Arena
    begin: int = 0
    sizes: dict[int, int] = field(default_factory=dict)

    def write(self, seeds: Sequence[int], nbytes: int) -> list[bool]:
        """Write the payloads of these seeds."""
        slots = self.slots([nbytes] * len(seeds))
        for seed, offset in zip(seeds, slots.offsets.tolist(), strict=True):
            self.arena.memory[offset : offset + nbytes] = np.frombuffer(payload_of(seed, nbytes), np.uint8)
            self.sizes.setdefault(seed, nbytes)
        return self.tier.write([key_of(seed) for seed in seeds], slots)

    def read(self, seeds: Sequence[int], nbytes: int | None = None) -> list[bool]:
        """Read them, in the size that they were written in unless told otherwise; fails on any wrong byte."""
        sizes = [nbytes or self.sizes[seed] for seed in seeds]
        slots = self.slots(sizes)
        for offset, size in zip(slots.offsets.tolist(), sizes, strict=True):
            self.arena.memory[offset : offset + size] = 0xA5
        answers = self.tier.read([key_of(seed) for seed in seeds], slots)
        for seed, size, offset, found in zip(seeds, sizes, slots.offsets.tolist(), answers, strict=True):
            if found:
                served = self.arena.payload(offset, size)
                assert served == payload_of(seed, size), f"{self.tier.name} served wrong bytes for seed {seed}"
        return answers

    def slots(self, sizes: Sequence[int]) -> Slots:
        """Slots side by side."""
        ends = self.begin + np.cumsum([slot_nbytes(size) for size in sizes])
        assert not len(sizes) or ends[-1] <= self.arena.capacity, "the test's arena is too small for this batch"
        starts = ends - [slot_nbytes(size) for size in sizes]
        return Slots(starts.astype(np.int64), np.array(sizes, np.int64))

    def contains(self, seeds: Sequence[int]) -> list[bool]:
        """Which of them are stored."""
        return self.tier.contains([key_of(seed) for seed in seeds])


class ReadingKit:
    """What holds for every tier, also where others do the writing: subclass it and provide the fixture `desk`."""

    @pytest.fixture
    def arena(self) -> Arena:
        """Memory for the slots of a test."""
        return Arena.private(16 << 20)

    @pytest.fixture
    def desk(self) -> Iterator[Desk]:
        """A fresh tier, whose desk can get payloads into it."""
        raise NotImplementedError

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_reads_what_was_written(self, desk: Desk, nbytes: int) -> None:
        seeds = list(range(7))
        assert desk.write(seeds, nbytes) == [True] * 7
        assert desk.contains(seeds) == [True] * 7
        assert desk.read(seeds[::-1]) == [True] * 7
        assert desk.read([3]) == [True]

    def test_an_empty_batch_is_fine(self, desk: Desk) -> None:
        assert desk.write([], 192) == desk.read([]) == desk.contains([]) == []

    def test_absent_keys_are_answered_false_among_others(self, desk: Desk) -> None:
        desk.write([1, 3], 5000)
        assert desk.read([0, 1, 2, 3], 5000) == [False, True, False, True]
        assert desk.contains([0, 1, 2, 3]) == [False, True, False, True]

    def test_a_payload_of_another_size_is_not_read(self, desk: Desk) -> None:
        desk.write([1], 5000)
        assert desk.read([1, 1], 12_000) == [False, False]
        assert desk.read([1], 5001) == [False]
        assert desk.read([1], 5000) == [True]

    def test_slots_that_are_none_are_answered_false(self, desk: Desk) -> None:
        desk.write([1], 5000)
        for offset in (64, -PAGE, desk.arena.capacity - PAGE, desk.arena.capacity):
            assert desk.tier.read([key_of(1)], Slots.of([offset], [5000])) == [False]
            assert desk.tier.write([key_of(2)], Slots.of([offset], [5000])) == [False]
        assert desk.tier.write([b"short"], Slots.of([0], [5000])) == [False]

    def test_closed_is_closed(self, desk: Desk) -> None:
        desk.write([1], 5000)
        desk.tier.close()
        desk.tier.close()
        calls: list[Callable[[], object]] = [
            lambda: desk.read([1]),
            lambda: desk.write([1], 5000),
            lambda: desk.contains([1]),
            lambda: desk.tier.remove([key_of(1)]),
            desk.tier.inventory,
            desk.tier.dropped,
            desk.tier.usage,
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                call()

    def test_closing_waits_for_readers(self, desk: Desk) -> None:
        desk.write(list(range(8)), 40_000)
        seen: list[bool] = []

        def read() -> None:
            try:
                while True:
                    seen.extend(desk.read(list(range(8))))
            except ClosedError:
                pass

        with closing(desk.tier):
            thread = threading.Thread(target=read)
            thread.start()
            while not seen:
                pass
        thread.join()
        assert all(seen)


class TierKit(ReadingKit):
    """Subclass it and provide the fixture `make_tier`."""

    capacity = 8 << 20

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        """Build a tier that copies from and to this arena and holds this many bytes."""
        raise NotImplementedError

    @pytest.fixture
    def desk(self, make_tier: MakeTier, arena: Arena) -> Iterator[Desk]:
        """A fresh tier."""
        with closing(make_tier(arena, self.capacity)) as tier:
            yield Desk(tier, arena)

    def test_a_key_never_changes(self, desk: Desk) -> None:
        assert desk.write([1, 1], 5000) == [True, True]
        used = desk.tier.usage()
        assert desk.write([1], 5000) == [True]
        assert desk.tier.usage().used == used.used
        assert desk.tier.usage().blocks == 1
        assert desk.read([1]) == [True]

    def test_removed_keys_are_gone_and_can_be_written_again(self, desk: Desk) -> None:
        desk.write([1, 2, 3], 5000)
        desk.tier.remove([key_of(2), key_of(9)])
        assert desk.contains([1, 2, 3]) == [True, False, True]
        assert desk.read([1, 2, 3]) == [True, False, True]
        assert desk.tier.dropped() == []
        assert desk.write([2], 5000) == [True]
        assert desk.read([1, 2, 3]) == [True] * 3

    def test_the_inventory_says_all_oldest_first(self, desk: Desk) -> None:
        for seed, nbytes in enumerate(SIZES):
            desk.write([seed], nbytes)
        desk.tier.remove([key_of(1)])
        inventory = desk.tier.inventory()
        assert list(inventory.nbytes.items()) == [(key_of(s), n) for s, n in enumerate(SIZES) if s != 1]
        assert desk.tier.usage().blocks == len(SIZES) - 1

    def test_the_inventory_says_what_headers_say(self, desk: Desk) -> None:
        desk.write(range(3), 5000)
        for seed, record in enumerate(desk.tier.inventory().records):
            header = BlockHeader.unpack(payload_of(seed, 5000))
            assert (record["tokens"], record["codec"], record["expires"]) == (
                header.tokens,
                header.codec,
                header.expires,
            )
            assert record["space"].tobytes() == header.space

    def test_capacity_is_never_exceeded_and_what_vanishes_is_reported(self, desk: Desk) -> None:
        accepted: set[bytes] = set()
        dropped: list[bytes] = []
        for seed in range(0, 600, 6):
            batch = list(range(seed, seed + 6))
            nbytes = SIZES[seed // 6 % len(SIZES)]
            accepted |= {key_of(s) for s, said in zip(batch, desk.write(batch, nbytes), strict=True) if said}
            usage = desk.tier.usage()
            assert usage.used <= usage.capacity <= self.capacity
            dropped += desk.tier.dropped()
        held = set(desk.tier.inventory().keys)
        assert len(accepted) > 50
        assert len(dropped) == len(set(dropped))
        assert held == accepted - set(dropped)
        assert all(desk.read([s for s in desk.sizes if key_of(s) in held]))
        assert not any(desk.read([s for s in desk.sizes if key_of(s) not in held]))

    def test_a_payload_larger_than_the_tier_is_refused(self, desk: Desk) -> None:
        assert desk.write([1], self.capacity + 1) == [False]
        assert desk.write([2], 5000) == [True]

    def test_threads_never_see_wrong_bytes(self, desk: Desk) -> None:
        """Writers push blocks out while readers read them: a reader gets the right bytes or none."""
        part = desk.arena.capacity // 4
        errors: list[BaseException] = []
        hits = [0, 0, 0, 0]

        def work(number: int) -> None:
            mine = Desk(desk.tier, desk.arena, number * part, dict.fromkeys(range(2000), 20_000))
            random = np.random.default_rng(number)
            try:
                for step in range(60):
                    seeds = random.integers(step * 10, step * 10 + 60, 12).tolist()
                    if number % 2:
                        mine.write(seeds, 20_000)
                        mine.tier.remove([key_of(seeds[0])])
                    else:
                        hits[number] += sum(mine.read(seeds))
            except BaseException as exc:  # noqa: BLE001 - handed to the test's own thread
                errors.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert desk.tier.usage().used <= self.capacity

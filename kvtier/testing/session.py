"""What every `Session` must pass.

Subclass `SessionKit` and give two pytest fixtures: `host`, a `Host` over an arena of `CAPACITY` bytes, and
`open_session`, called without arguments: it opens a session with that host, and closes it at the end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kvtier.block import PAGE, slot_nbytes, verify_payload
from kvtier.client.session import Session
from kvtier.errors import DeadlineExceeded
from kvtier.hierarchy.answers import GrantState, Matched, Reserved
from kvtier.hierarchy.cache import Hierarchy
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.base import TierNumber

CAPACITY = 4 << 20
NBYTES = 20_000
FULL = CAPACITY // slot_nbytes(NBYTES)
"""Blocks that fill the arena."""
PATIENCE = 5.0

OpenSession = Callable[[], Session]


@dataclass(frozen=True)
class Host:
    """A hierarchy with two tiers: the arena, and one in memory that plays NVMe."""

    hierarchy: Hierarchy
    nvme: MemoryTier


@contextmanager
def host_over(arena: Arena, writer_gone: Callable[[int], bool] = lambda _: True) -> Iterator[Host]:
    """A host for the kit."""
    nvme = MemoryTier(arena, 16 * CAPACITY)
    store = LocalStore()
    index = LocalIndex(store, store.register("kit"))
    hierarchy = Hierarchy(arena, {TierNumber.NVME: nvme}, index, writer_gone=writer_gone)
    try:
        yield Host(hierarchy, nvme)
    finally:
        nvme.gate.set()
        hierarchy.close()


def eventually(check: Callable[[], bool]) -> bool:
    """Poll until `check` holds; False when it does not in time."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def chain(first: int, count: int) -> list[bytes]:
    """Addresses of payload seeds `first` and on."""
    return [key_of(seed) for seed in range(first, first + count)]


def fill(session: Session, reserved: Reserved, first: int, count: int = 1 << 30) -> list[int]:
    """Write the payloads of seeds `first` and on into the first `count` granted slots; the positions written."""
    granted = np.flatnonzero(reserved.grants["state"] == GrantState.GRANTED).tolist()[:count]
    memory = session.writable()
    for i in granted:
        offset = int(reserved.grants["offset"][i])
        memory[offset : offset + NBYTES] = np.frombuffer(payload_of(first + i, NBYTES), np.uint8)
    return granted


def reserve(session: Session, first: int, count: int, start: int = 0) -> Reserved:
    """Reserve slots for a chain, beyond its first `start` blocks."""
    return session.reserve(chain(first, count), [NBYTES] * (count - start), start)


def save(session: Session, first: int, count: int) -> int:
    """Store a chain; how many of its blocks are new."""
    with session.writing():
        reserved = reserve(session, first, count)
        return sum(session.commit(reserved.ticket, fill(session, reserved, first))) if reserved.ticket else 0


def states(reserved: Reserved) -> list[int]:
    """States of the grants."""
    found: list[int] = reserved.grants["state"].tolist()
    return found


def found(session: Session, first: int, count: int) -> int:
    """How many blocks of a chain are there now; takes no lease."""
    matched = session.match(chain(first, count), 0.0)
    session.release(matched.lease)
    return len(matched.slots)


def holds(session: Session, matched: Matched, first: int) -> bool:
    """Whether the leased slots hold what the seeds say, under the generations that the lease names."""
    there, count = 0, len(matched.slots)
    while there < count and (more := session.fetch(matched.lease, there, count)):
        there += more
    if there < count:
        return False
    for i, slot in enumerate(matched.slots):
        offset, nbytes = int(slot["offset"]), int(slot["nbytes"])
        payload = session.readable()[offset : offset + nbytes]
        verify_payload(payload.data, expected=key_of(first + i))
        if session.generations()[offset // PAGE] != slot["generation"]:
            return False
    return True


class SessionKit:
    """Laws of `kvtier.client.session.Session`."""

    def test_nothing_stored_is_nothing_leased(self, open_session: OpenSession) -> None:
        session = open_session()
        for keys in ([], chain(0, 3)):
            matched = session.match(keys, 0.0)
            assert (matched.lease, len(matched.slots), matched.staging, len(matched.tiers)) == (0, 0, 0, 0)

    def test_what_was_committed_is_matched_by_every_session(self, open_session: OpenSession) -> None:
        writer, reader = open_session(), open_session()
        assert save(writer, 0, 5) == 5
        for session in (writer, reader):
            matched = session.match(chain(0, 7), 0.0)
            assert len(matched.slots) == 5
            assert matched.lease
            assert set(matched.slots["nbytes"].tolist()) == {NBYTES}
            assert matched.tiers.tolist() == [TierNumber.CPU] * 5
            assert holds(session, matched, 0)

    def test_a_match_is_a_prefix(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, 2)
        save(session, 3, 2)
        assert found(session, 0, 5) == 2
        assert found(session, 2, 3) == 0

    def test_nothing_is_visible_before_commit(self, open_session: OpenSession) -> None:
        session = open_session()
        reserved = reserve(session, 0, 2)
        written = fill(session, reserved, 0)
        assert found(session, 0, 2) == 0
        assert session.commit(reserved.ticket, written, 0.001) == [True, True]
        assert found(session, 0, 2) == 2

    def test_what_is_stored_or_being_stored_is_not_granted_again(self, open_session: OpenSession) -> None:
        one, two = open_session(), open_session()
        save(one, 0, 2)
        held = reserve(one, 0, 4)
        assert states(held) == [GrantState.STORED] * 2 + [GrantState.GRANTED] * 2
        other = reserve(two, 0, 5)
        assert states(other) == [GrantState.STORED] * 2 + [GrantState.BUSY] * 2 + [GrantState.GRANTED]
        assert other.reason == ""
        stored = reserve(two, 0, 2)
        assert (states(stored), stored.ticket) == ([GrantState.STORED] * 2, 0)

    def test_only_what_lies_beyond_the_start_is_granted(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, 2)
        reserved = reserve(session, 0, 3, start=2)
        assert states(reserved) == [GrantState.GRANTED]

    def test_what_is_not_written_is_given_back(self, open_session: OpenSession) -> None:
        one, two = open_session(), open_session()
        reserved = reserve(one, 0, 4)
        assert one.commit(reserved.ticket, fill(one, reserved, 0, 2)) == [True, True]
        assert states(reserve(two, 0, 4)) == [GrantState.STORED] * 2 + [GrantState.GRANTED] * 2

    def test_an_empty_commit_gives_all_back(self, open_session: OpenSession) -> None:
        one, two = open_session(), open_session()
        assert one.commit(reserve(one, 0, 3).ticket, []) == []
        assert found(one, 0, 3) == 0
        assert states(reserve(two, 0, 3)) == [GrantState.GRANTED] * 3

    def test_a_slot_without_a_whole_payload_does_not_become_visible(self, open_session: OpenSession) -> None:
        session = open_session()
        reserved = reserve(session, 0, 3)
        written = fill(session, reserved, 0)
        offset = int(reserved.grants["offset"][1])
        session.writable()[offset : offset + 64] = 0
        assert session.commit(reserved.ticket, written) == [True, False, True]
        assert found(session, 0, 3) == 1

    def test_a_ticket_is_good_once_and_for_its_session_only(self, open_session: OpenSession) -> None:
        one, two = open_session(), open_session()
        reserved = reserve(one, 0, 1)
        written = fill(one, reserved, 0)
        assert two.commit(reserved.ticket, written) == [False]
        assert one.commit(reserved.ticket, written) == [True]
        assert one.commit(reserved.ticket, written) == [False]
        assert one.commit(123_456, [0]) == [False]

    def test_a_session_may_not_reserve_everything(self, open_session: OpenSession) -> None:
        reserved = reserve(open_session(), 0, FULL)
        refused = states(reserved).index(GrantState.REFUSED)
        assert reserved.reason == "quota"
        assert FULL // 3 < refused <= CAPACITY // 2 // NBYTES
        assert states(reserved) == [GrantState.GRANTED] * refused + [GrantState.REFUSED] * (FULL - refused)

    def test_a_payload_that_never_fits_is_refused(self, open_session: OpenSession) -> None:
        reserved = open_session().reserve(chain(0, 1), [2 * CAPACITY], 0)
        assert (reserved.ticket, reserved.reason) == (0, "too_large")

    def test_leased_blocks_stay_and_released_ones_make_room(self, open_session: OpenSession) -> None:
        session = open_session()
        third = FULL // 3
        assert [save(session, first, third) for first in (0, third)] == [third, third]
        leases = [session.match(chain(first, third), 0.0) for first in (0, third)]
        assert [len(lease.slots) for lease in leases] == [third, third]
        rest = reserve(session, 2 * third, FULL // 2)
        assert rest.reason == "pressure"
        session.commit(rest.ticket, [])
        assert all(holds(session, lease, first) for lease, first in zip(leases, (0, third), strict=True))
        for lease in leases:
            session.release(lease.lease, 0.001)

        def fits() -> bool:
            again = reserve(session, 2 * third, FULL // 2)
            session.commit(again.ticket, [])
            return not again.reason

        assert eventually(fits)

    def test_a_slot_that_is_granted_again_has_another_generation(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, 1)
        old = session.match(chain(0, 1), 0.0)
        session.release(old.lease)
        session.condemn(chain(0, 1), "test")
        pages = old.slots["offset"] // PAGE
        reserved = reserve(session, 100, FULL // 2 - 1)
        assert int(old.slots["offset"][0]) in reserved.grants["offset"].tolist()
        assert session.generations()[pages] != old.slots["generation"]
        assert (session.generations()[reserved.grants["offset"] // PAGE] == reserved.grants["generation"]).all()

    def test_release_is_idempotent_and_knows_no_strangers(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, 1)
        matched = session.match(chain(0, 1), 0.0)
        for lease in (0, 999_999, matched.lease, matched.lease):
            session.release(lease)
        (block,) = session.inspect(chain(0, 1))
        assert block is not None
        assert block["leased"] is False

    def test_leased_bytes_are_capped(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, FULL // 2 - 1)
        leases = [session.match(chain(0, FULL // 2 - 1), 0.0) for _ in range(3)]
        assert len(leases[2].slots) < FULL // 2 - 1
        assert sum(len(lease.slots) for lease in leases) <= FULL

    def test_condemned_blocks_are_dropped_everywhere(self, open_session: OpenSession, host: Host) -> None:
        session = open_session()
        save(session, 0, 3)
        session.move(chain(0, 3), TierNumber.NVME, PATIENCE)
        session.condemn(chain(1, 1), "test")
        assert session.inspect(chain(1, 1)) == [None]
        assert eventually(lambda: host.nvme.contains(chain(0, 3)) == [True, False, True])

    def test_moved_down_blocks_are_staged_for_a_match_that_waits(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, 4)
        assert session.move(chain(0, 4), TierNumber.NVME, PATIENCE) == 4
        matched = session.match(chain(0, 4), PATIENCE)
        assert len(matched.slots) == 4
        assert matched.tiers.tolist() == [TierNumber.NVME] * 4
        assert holds(session, matched, 0)

    def test_a_match_that_does_not_wait_says_what_is_on_its_way(self, open_session: OpenSession, host: Host) -> None:
        session = open_session()
        save(session, 0, 4)
        session.move(chain(0, 4), TierNumber.NVME, PATIENCE)
        host.nvme.gate.clear()
        for wait in (0.0, 0.01):
            matched = session.match(chain(0, 5), wait)
            assert (matched.lease, len(matched.slots), matched.staging) == (0, 0, 4)
        host.nvme.gate.set()
        assert eventually(lambda: found(session, 0, 4) == 4)

    def test_a_move_that_takes_too_long_goes_on(self, open_session: OpenSession, host: Host) -> None:
        session = open_session()
        save(session, 0, 2)
        host.nvme.gate.clear()
        with pytest.raises(DeadlineExceeded, match="goes on"):
            session.move(chain(0, 2), TierNumber.NVME, 0.01)
        host.nvme.gate.set()
        assert eventually(lambda: tiers(session, 0, 2) == [["nvme"], ["nvme"]])

    def test_prefetch_brings_blocks_up_and_leaves_their_copies(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, 3)
        session.move(chain(0, 3), TierNumber.NVME, PATIENCE)
        assert session.prefetch(chain(0, 4), TierNumber.CPU).result(PATIENCE) == 3
        assert tiers(session, 0, 3) == [["cpu", "nvme"]] * 3
        assert found(session, 0, 3) == 3

    def test_inspect_says_what_is_known(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, 1)
        session.match(chain(0, 1), 0.0)
        block, unknown = session.inspect(chain(0, 2))
        assert unknown is None
        assert block is not None
        assert (block["tiers"], block["nbytes"], block["codec"], block["hits"]) == (["cpu"], NBYTES, 1, 1)
        assert block["leased"] is True
        assert 0 < block["created"] <= block["last_access"]

    def test_where_says_how_much_of_a_chain_a_host_has_and_changes_nothing(self, open_session: OpenSession) -> None:
        session = open_session()
        assert session.where(chain(0, 3)).places == ()
        save(session, 0, 4)
        session.move(chain(2, 2), TierNumber.NVME, PATIENCE)
        before = session.status()
        (place,) = session.where(chain(0, 6)).places
        assert (place.here, place.blocks, place.tiers) == (True, 4, {"cpu": 2, "nvme": 2})
        assert place.host
        assert session.where(chain(1, 1)).places[0].blocks == 1
        assert session.where([]).places == ()
        after = session.status()
        assert {name: after[name] for name in ("leases", "lookups", "hits", "misses", "moves", "staging")} == {
            name: before[name] for name in ("leases", "lookups", "hits", "misses", "moves", "staging")
        }

    def test_status_is_plain_values(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, 3)
        session.match(chain(0, 3), 0.0)
        status = session.status()
        assert (status["blocks"], status["leases"], status["leased_nbytes"]) == (3, 1, 3 * slot_nbytes(NBYTES))
        assert json.loads(json.dumps(status)) == status

    def test_readers_cannot_write(self, open_session: OpenSession) -> None:
        session = open_session()
        assert not session.readable().flags.writeable
        assert not session.generations().flags.writeable
        assert session.readable().nbytes == session.writable().nbytes

    def test_close_gives_everything_back(self, open_session: OpenSession) -> None:
        gone, other = open_session(), open_session()
        half = FULL // 2 - 1
        assert save(gone, 0, half) == half
        gone.match(chain(0, half), 0.0)
        gone.close()
        gone.close()
        assert eventually(lambda: other.status()["leases"] == 0)
        late = open_session()
        reserve(late, 1000, half // 2)
        late.close()
        assert eventually(lambda: other.status()["reservations"] == 0)
        assert eventually(lambda: other.status()["tiers"][0]["used"] == half * slot_nbytes(NBYTES))
        assert eventually(lambda: states(reserve(other, 1000, 1)) == [GrantState.GRANTED])

    def test_many_threads_share_a_session(self, open_session: OpenSession) -> None:
        session = open_session()
        start = threading.Barrier(8)

        def work(number: int) -> int:
            start.wait()
            first = 1000 * number
            new = save(session, first, 4)
            for _ in range(10):
                matched = session.match(chain(first, 4), 0.0)
                assert len(matched.slots) == 4
                assert holds(session, matched, first)
                session.release(matched.lease)
            return new

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == [4] * 8
        assert session.status()["reservations"] == 0


def tiers(session: Session, first: int, count: int) -> list[Sequence[str]]:
    """Tiers of each block of a chain; empty for unknown ones."""
    return [block["tiers"] if block else [] for block in session.inspect(chain(first, count))]

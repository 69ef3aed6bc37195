"""What every `Session` must pass of pins, dropping and streams; a second half of `kvtier.testing.session`."""

from __future__ import annotations

import time

import pytest

from kvtier.block import SPACE_NBYTES, slot_nbytes
from kvtier.hierarchy.answers import GrantState
from kvtier.testing.payloads import key_of
from kvtier.testing.session import (
    FULL,
    NBYTES,
    PATIENCE,
    Host,
    OpenSession,
    chain,
    eventually,
    found,
    holds,
    reserve,
    save,
    states,
    tiers,
)
from kvtier.tiers.base import TierNumber

PINNABLE = FULL // 4
"""Blocks that pins may keep."""


class RetentionKit:
    """Laws of `kvtier.client.session.Session`; fixtures as for `SessionKit`."""

    def test_pinned_blocks_come_up_and_outlive_everything(self, open_session: OpenSession) -> None:
        owner, other = open_session(), open_session()
        save(owner, 0, 4)
        owner.move(chain(0, 4), TierNumber.NVME, PATIENCE)
        assert owner.pin(chain(0, 6), 100.0) == 4
        owner.close()
        assert other.move(chain(0, 4), TierNumber.NVME, PATIENCE) == 0
        for first in range(100, 1000, FULL // 4):
            save(other, first, FULL // 4)
        assert all("cpu" in there for there in tiers(other, 0, 4))
        (held,) = [one for one in other.status()["held"] if one["kind"] == "pin"]
        assert held["owner"]
        assert -100.0 <= held["age"] < 0
        assert other.unpin(chain(0, 6)) == 4
        assert other.unpin(chain(0, 6)) == 0
        assert eventually(lambda: other.move(chain(0, 4), TierNumber.NVME, PATIENCE) == 4)

    def test_pins_end(self, open_session: OpenSession) -> None:
        session = open_session()
        save(session, 0, 2)
        assert session.pin(chain(0, 2), 0.05) == 2
        assert eventually(lambda: session.status()["pins"] == 0)

    def test_pins_take_a_part_of_the_tier_only(self, open_session: OpenSession) -> None:
        session = open_session()
        half = FULL // 2 - 1
        save(session, 0, half)
        assert PINNABLE - 2 <= session.pin(chain(0, half), 100.0) <= PINNABLE
        assert session.pin(chain(0, 2), 100.0) == 2, "pinned already"
        assert session.status()["refused"]["pin_quota"] > 0

    def test_evicted_blocks_are_gone_everywhere(self, open_session: OpenSession, host: Host) -> None:
        session = open_session()
        save(session, 0, 4)
        session.move(chain(0, 4), TierNumber.NVME, PATIENCE)
        assert session.pin(chain(0, 4), 100.0) == 4
        leased = session.match(chain(0, 4), 0.0)
        assert session.evict([*chain(2, 2), *chain(50, 1)]) == 2
        assert tiers(session, 0, 4) == [["cpu", "nvme"]] * 2 + [[]] * 2
        assert holds(session, leased, 0), "leased bytes stay"
        assert session.status()["pins"] == 2
        assert eventually(lambda: host.nvme.contains(chain(0, 4)) == [True, True, False, False])
        session.release(leased.lease)
        assert eventually(lambda: states(reserve(session, 2, 2)) == [GrantState.GRANTED] * 2)

    def test_a_keyspace_is_cleared_and_no_other(self, open_session: OpenSession, host: Host) -> None:
        session = open_session()
        save(session, 0, 3)
        session.move(chain(0, 3), TierNumber.NVME, PATIENCE)
        assert session.clear(key_of(1)[:SPACE_NBYTES]) == 1
        assert session.clear(key_of(1)[:SPACE_NBYTES]) == session.clear(bytes(SPACE_NBYTES)) == 0
        assert tiers(session, 0, 3) == [["nvme"], [], ["nvme"]]
        assert eventually(lambda: host.nvme.contains(chain(0, 3)) == [True, False, True])

    def test_a_stream_gives_what_is_there_and_then_the_rest(self, open_session: OpenSession, host: Host) -> None:
        session = open_session()
        save(session, 0, 6)
        session.move(chain(0, 6), TierNumber.NVME, PATIENCE)
        session.prefetch(chain(0, 2), TierNumber.CPU).result(PATIENCE)
        host.nvme.gate.clear()
        first = session.match(chain(0, 7), 0.0, stream=True)
        assert (len(first.slots), first.staging) == (2, 4)
        began = time.monotonic()
        none = session.match(chain(0, 7), 0.1, stream=True, after=2)
        assert (len(none.slots), none.staging) == (2, 4)
        assert time.monotonic() - began >= 0.1
        host.nvme.gate.set()
        rest = session.match(chain(0, 7), PATIENCE, stream=True, after=2)
        assert (len(rest.slots), rest.staging) == (6, 0)
        assert rest.tiers.tolist() == [TierNumber.CPU] * 2 + [TierNumber.NVME] * 4
        status = session.status()
        assert status["lookups"] == {"partial": 1}
        assert {tier: n for tier, n in status["hits"].items() if n} == {"cpu": 2, "nvme": 4}
        assert {why: n for why, n in status["misses"].items() if n} == {"absent": 1, "staging": 4}

    def test_what_was_asked_before_is_leased_again_and_counted_once(self, open_session: OpenSession) -> None:
        """An engine's scheduler matches, and then each of its workers."""
        scheduler, worker = open_session(), open_session()
        save(scheduler, 0, 4)
        scheduler.move(chain(2, 2), TierNumber.NVME, PATIENCE)
        counted = "lookups", "hits", "misses", "tokens"
        none = scheduler.status()
        for wait, stream in ((0.0, False), (0.0, True), (PATIENCE, True), (PATIENCE, False)):
            matched = worker.match(chain(0, 5), wait, stream=stream, after=3 if wait and stream else 0, again=True)
            assert len(matched.slots) == 4 or not wait
            assert holds(worker, matched, 0)
            worker.release(matched.lease)
        assert [scheduler.status()[name] for name in counted] == [none[name] for name in counted]
        assert found(scheduler, 0, 5) == 4
        (uses,) = {block["hits"] for block in scheduler.inspect(chain(0, 4)) if block}
        assert uses == 1
        status = scheduler.status()
        assert {tier: n for tier, n in status["hits"].items() if n} == {"cpu": 2, "nvme": 2}
        assert {why: n for why, n in status["misses"].items() if n} == {"absent": 1}

    def test_who_read_a_part_says_how_fast_that_part_was(self, open_session: OpenSession) -> None:
        session = open_session()
        blocks = 80
        save(session, 0, blocks)
        for _ in range(3):
            session.release(session.match(chain(0, blocks), 0.0).lease, 2.0, 0.75)
        assert eventually(lambda: session.status()["bandwidth"].get("cpu", 0) > 0)
        read = 0.75 * blocks * slot_nbytes(NBYTES)
        assert session.status()["bandwidth"]["cpu"] == pytest.approx(read / 2.0, rel=1e-3)

    def test_what_loads_slower_than_it_computes_is_declined(self, open_session: OpenSession, host: Host) -> None:
        """Loads of 80 blocks in 2 s are said of the CPU tier: 64 tokens take 1/40 s."""
        session = open_session()
        blocks = 80
        save(session, 0, blocks)
        for _ in range(3):
            matched = session.match(chain(0, blocks), 0.0)
            assert len(matched.slots) == blocks
            session.release(matched.lease, 2.0)
        assert eventually(lambda: session.status()["bandwidth"].get("cpu", 0) > 0)
        slow = 64 / (2.0 / blocks)
        assert len(session.match(chain(0, 3), 0.0, prefill=0.9 * slow).slots) == 3
        assert len(session.match(chain(0, 3), 0.0, prefill=1.1 * slow).slots) == 0
        assert session.status()["misses"]["declined_recompute_cheaper"] == 3
        assert found(session, 0, 3) == 3

"""What moves by itself: demotion, promotion, condemning, ends of sessions, failures, closing."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from kvtier.errors import TierUnavailable
from kvtier.hierarchy.answers import GrantState
from kvtier.hierarchy.cache import Limits
from kvtier.hierarchy.loading import Wish
from kvtier.hierarchy.table import BlockTable
from kvtier.tiers.base import TierNumber
from tests.hierarchy_fixture import NBYTES, SLOT_NBYTES, Host, fill, holds, keys, reserve, save, states

CPU, NVME, GPU = TierNumber.CPU, TierNumber.NVME, TierNumber.GPU
PLENTY = Limits(session_leased=1 << 30, session_reserved=1 << 30, staging_reserve=0.0)


def raises(error: Exception):
    def hook() -> None:
        raise error

    return hook


def held() -> tuple[threading.Event, threading.Event, object]:
    """A hook that says when it is reached and waits until it may go on."""
    reached, go_on = threading.Event(), threading.Event()

    def hook() -> None:
        reached.set()
        assert go_on.wait(10.0)

    return reached, go_on, hook


class TestWatermark:
    def test_old_blocks_move_down_children_first(self):
        with Host(blocks=20, limits=PLENTY) as host:
            session = host.session()
            save(session, range(10))
            save(session, range(20, 30))
            host.mover.drain()
            pool = host.state.cpu.pool
            assert pool.used <= 0.8 * pool.capacity
            below = [seed for seed in range(10) if host.tiers_of(seed) == ["nvme"]]
            assert below == list(range(10 - len(below), 10))
            assert host.stats.dropped == {}
            assert host.stats.moves["cpu", "nvme"] == len(below) == len(host.nvme.seeds(range(40)))
            host.check()

    def test_a_leased_child_keeps_its_parents(self):
        """Leased between the choice and the move: the parents stay too, or the prefix would have a hole."""
        with Host(blocks=20, limits=PLENTY) as host:
            session = host.session()
            save(session, range(8))
            reached, go_on, hook = held()
            host.nvme.hooks["write"] = hook
            rows = [host.state.table.rows[key] for key in keys(range(7, -1, -1))]
            thread = threading.Thread(target=host.mover.demotion.demote, args=(rows,))
            thread.start()
            assert reached.wait(10.0)
            matched = session.match(keys(range(4)), 0.0)
            go_on.set()
            thread.join()
            assert [seed for seed in range(8) if "cpu" in host.tiers_of(seed)] == list(range(4))
            assert holds(session, matched, range(4))
            session.release(matched.lease)
            host.check()

    def test_what_two_threads_move_at_once_is_counted_once(self):
        """The keeper and whoever stages may choose the same blocks before either has written them."""
        with Host(blocks=20, limits=PLENTY) as host:
            save(host.session(), range(8))
            reached, go_on, hook = held()
            host.nvme.hooks["write"] = hook
            rows = [host.state.table.rows[key] for key in keys(range(7, -1, -1))]
            threads = [threading.Thread(target=host.mover.demotion.demote, args=(rows,)) for _ in range(2)]
            threads[0].start()
            assert reached.wait(10.0)
            threads[1].start()
            slot = int(host.state.table.offset[rows[0]])
            while host.state.cpu.pool.references(slot) < 3:  # the block's own, and one of each
                threads[1].join(0.01)
                assert threads[1].is_alive()
            go_on.set()
            for thread in threads:
                thread.join()
            assert host.stats.moves["cpu", "nvme"] == len(host.nvme.seeds(range(8))) == 8
            host.check()

    def test_what_is_used_meanwhile_stays(self):
        with Host(blocks=20, limits=PLENTY) as host:
            session = host.session()
            save(session, range(8))
            reached, go_on, hook = held()
            host.nvme.hooks["write"] = hook
            rows = [host.state.table.rows[key] for key in keys(range(7, -1, -1))]
            thread = threading.Thread(target=host.mover.demotion.demote, args=(rows,))
            thread.start()
            assert reached.wait(10.0)
            session.release(session.match(keys(range(4)), 0.0).lease)
            go_on.set()
            thread.join()
            assert [seed for seed in range(8) if "cpu" in host.tiers_of(seed)] == list(range(4))
            host.check()

    def test_a_child_that_comes_meanwhile_keeps_its_parents(self):
        with Host(blocks=20, limits=PLENTY) as host:
            session = host.session()
            save(session, range(4))
            reserved = reserve(session, range(5), start=4)
            written = fill(session, reserved, [4])
            reached, go_on, hook = held()
            host.nvme.hooks["write"] = hook
            rows = [host.state.row(key) for key in keys(range(3, -1, -1))]
            thread = threading.Thread(target=host.mover.demotion.demote, args=(rows,))
            thread.start()
            assert reached.wait(10.0)
            session.commit(reserved.ticket, written)
            go_on.set()
            thread.join()
            assert len(session.match(keys(range(5)), 0.0).slots) == 5

    def test_a_tier_below_that_refuses_does_not_stop_the_host(self):
        with Host(blocks=20, nvme=0, limits=PLENTY) as host:
            session = host.session()
            save(session, range(20))
            host.mover.drain()
            assert host.stats.faults["nvme_refused"] > 0
            assert host.stats.dropped["cpu_evicted"] > 0
            assert len(session.match(keys(range(20)), 0.0).slots) >= 10
            host.check()

    def test_what_a_tier_drops_of_its_own_accord_is_heard(self):
        with Host(limits=PLENTY) as host:
            session = host.session()
            save(session, [1, 2, 3])
            session.move(keys([1, 2, 3]), NVME, 5.0)
            host.nvme.evict(3)
            save(session, [4])
            session.move(keys([4]), NVME, 5.0)
            assert host.tiers_of(3) == []
            assert host.told(3) == 0
            assert host.stats.dropped == {"nvme_evicted": 1}

    def test_what_was_dropped_and_written_again_is_there(self):
        with Host(limits=PLENTY) as host:
            session = host.session()
            save(session, [1])
            session.move(keys([1]), NVME, 5.0)
            session.prefetch(keys([1]), CPU).result(5.0)
            host.nvme.evicted += keys([1])
            host.state.leave(host.state.rows(keys([1])), NVME, "test")
            assert session.move(keys([1]), NVME, 5.0) == 1
            host.check()


class TestMoves:
    def test_out_of_memory_and_back(self):
        with Host() as host:
            session = host.session()
            save(session, [1, 2, 3])
            assert session.move(keys([1, 2, 3]), NVME, 5.0) == 3
            assert (host.tiers_of(2), host.told(2)) == (["nvme"], NVME)
            assert session.prefetch(keys([1, 2]), CPU).result(5.0) == 2
            assert (host.tiers_of(2), host.told(2)) == (["cpu", "nvme"], CPU)
            assert session.move(keys([1, 2, 3, 4]), CPU, 5.0) == 3
            host.check()

    def test_to_a_tier_that_is_not_there(self):
        with Host(nvme=None) as host:
            session = host.session()
            save(session, [1, 2])
            for tier in (NVME, GPU):
                assert session.move(keys([1, 2]), tier, 5.0) == 0
                assert session.prefetch(keys([1, 2]), tier).result(5.0) == 0
            assert host.tiers_of(2) == ["cpu"]
            assert host.stats.faults == {}

    def test_leased_blocks_stay_where_they_are_read(self):
        with Host() as host:
            session = host.session()
            save(session, [1, 2])
            matched = session.match(keys([1]), 0.0)
            assert session.move(keys([1, 2]), NVME, 5.0) == 1
            assert host.tiers_of(1) == ["cpu", "nvme"]
            assert holds(session, matched, [1])


class TestGpu:
    def test_what_is_matched_is_promoted(self):
        with Host(gpu=1 << 20) as host:
            session = host.session()
            save(session, [1, 2])
            session.release(session.match(keys([1, 2]), 0.0).lease)
            host.mover.drain()
            assert host.tiers_of(1) == ["gpu", "cpu"]
            assert host.told(1) == GPU
            writes = host.gpu.calls["write"]
            session.release(session.match(keys([1, 2]), 0.0).lease)
            host.mover.drain()
            assert host.gpu.calls["write"] == writes, "once is enough"
            host.check()

    def test_it_keeps_what_is_used_and_gives_the_rest_down(self):
        with Host(gpu=8 * SLOT_NBYTES) as host:
            session = host.session()
            for first in (0, 10):
                save(session, range(first, first + 3))
                session.move(keys(range(first, first + 3)), GPU, 5.0)
            assert host.tiers_of(0) == ["gpu"]
            session.release(session.match(keys(range(3)), 5.0).lease)
            host.mover.drain()
            save(session, range(20, 23))
            session.move(keys(range(20, 23)), GPU, 5.0)
            assert host.tiers_of(0)[0] == "gpu"
            assert host.tiers_of(12) == ["cpu"]
            assert host.stats.dropped == {}
            host.check()

    def test_hits_are_attributed_to_it(self):
        with Host(gpu=1 << 20) as host:
            session = host.session()
            save(session, [1, 2])
            assert session.move(keys([1, 2]), GPU, 5.0) == 2
            matched = session.match(keys([1, 2]), 5.0)
            assert matched.tiers.tolist() == [GPU, GPU]
            assert holds(session, matched, [1, 2])

    def test_a_tier_smaller_than_a_chain_takes_what_it_can(self):
        with Host(gpu=4 * SLOT_NBYTES) as host:
            session = host.session()
            save(session, range(10))
            session.move(keys(range(10)), GPU, 5.0)
            assert len(session.match(keys(range(10)), 5.0).slots) == 10
            assert host.stats.dropped == {}

    def test_refused_for_its_size_old_blocks_go_until_there_is_a_segment(self):
        with Host(gpu=1 << 20) as host:
            session = host.session()
            save(session, [1, 2, 3])
            session.move(keys([1, 2, 3]), GPU, 5.0)
            refusals = []
            real = host.gpu._write
            host.gpu._write = lambda key, payload: (
                real(key, payload) if refusals or key != keys([9])[0] else bool(refusals.append(key))
            )
            save(session, [9])
            session.release(session.match(keys([9]), 0.0).lease)
            host.mover.drain()
            assert host.tiers_of(9) == ["gpu", "cpu"]
            assert "cpu" in host.tiers_of(3)

    def test_it_may_be_gone(self):
        with Host(gpu=1 << 20) as host:
            session = host.session()
            for seed, call in enumerate(("usage", "write", "dropped")):
                save(session, [seed])
                host.gpu.hooks = {call: raises(TierUnavailable("dead"))}
                session.release(session.match(keys([seed]), 0.0).lease)
                host.mover.drain()
                assert host.tiers_of(seed)[-1] == "cpu"
            assert host.stats.faults["gpu_unavailable"] == 3
            host.check()


class TestCondemn:
    def test_it_is_gone_everywhere_and_may_be_saved_again(self):
        with Host(stored=[1]) as host:
            session = host.session()
            session.release(session.match(keys([1]), 5.0).lease)
            session.condemn(keys([1, 1, 8]), "bad_checksum")
            host.mover.drain()
            assert (host.tiers_of(1), host.told(1), host.nvme.seeds([1])) == ([], 0, set())
            assert host.stats.faults == {"bad_checksum": 3}
            assert host.stats.dropped == {"bad_checksum": 1}
            assert save(session, [1]) == 1
            host.check()

    def test_a_leased_slot_is_not_granted_again(self):
        with Host() as host:
            session = host.session()
            save(session, [1])
            matched = session.match(keys([1]), 0.0)
            session.condemn(keys([1]), "bad_header")
            host.mover.drain()
            reserved = reserve(session, [1])
            assert reserved.grants["offset"][0] != matched.slots["offset"][0]
            session.commit(reserved.ticket, fill(session, reserved, [1]))
            assert holds(session, matched, [1])
            session.release(matched.lease)
            host.check()

    def test_nobody_saves_it_anew_until_all_tiers_have_forgotten_it(self):
        """Else a tier would say that it has it already, and then forget it, or serve what was condemned."""
        with Host(stored=[1]) as host:
            session = host.session()
            session.release(session.match(keys([1]), 5.0).lease)
            reached, go_on, hook = held()
            host.nvme.hooks["remove"] = hook
            session.condemn(keys([1]), "bad_checksum")
            assert reached.wait(10.0)
            assert states(reserve(session, [1])) == [GrantState.BUSY]
            go_on.set()
            host.mover.drain()
            assert states(reserve(session, [1])) == [GrantState.GRANTED]

    def test_what_is_being_written_down_meanwhile_is_not_kept(self):
        with Host() as host:
            session = host.session()
            save(session, [1])
            reached, go_on, hook = held()
            host.nvme.hooks["write"] = hook
            moved = host.hierarchy.move(keys([1]), NVME)
            assert reached.wait(10.0)
            session.condemn(keys([1]), "bad_checksum")
            host.nvme.hooks.clear()
            go_on.set()
            assert moved.result(5.0) == 0
            host.mover.drain()
            assert host.nvme.seeds([1]) == set()
            host.check()

    def test_what_is_being_brought_up_meanwhile_is_not_kept(self):
        with Host(stored=[1]) as host:
            session = host.session()
            reached, go_on, hook = held()
            host.nvme.hooks["read"] = hook
            session.match(keys([1]), 0.0)
            assert reached.wait(10.0)
            session.condemn(keys([1]), "bad_checksum")
            go_on.set()
            host.mover.drain()
            assert host.tiers_of(1) == []
            host.check()

    def test_a_row_that_is_used_again_while_its_block_moves_is_not_mistaken(self):
        """The mover has pinned block 1; its row goes to block 2, whose slot nobody pinned."""
        with Host() as host:
            session = host.session()
            save(session, [1])
            row = host.state.row(keys([1])[0])
            reached, go_on, hook = held()
            host.nvme.hooks["write"] = hook
            moved = host.hierarchy.move(keys([1]), NVME)
            assert reached.wait(10.0)
            session.condemn(keys([1]), "bad_checksum")
            save(session, [2])
            assert host.state.row(keys([2])[0]) == row
            go_on.set()
            moved.result(5.0)
            host.mover.drain()
            assert host.tiers_of(2) == ["cpu"]
            assert host.nvme.seeds([1, 2]) == set()

    def test_what_is_written_down_late_does_not_pass_for_what_was_saved_anew(self):
        with Host() as host:
            session = host.session()
            save(session, [1])
            reached, go_on, hook = held()
            host.nvme.hooks["write"] = hook
            thread = threading.Thread(target=host.mover.demotion.demote, args=([host.state.row(keys([1])[0])],))
            thread.start()
            assert reached.wait(10.0)
            session.condemn(keys([1]), "bad_checksum")
            host.mover.bring([], CPU).result(10.0)
            assert save(session, [1]) == 1
            host.nvme.hooks.clear()
            go_on.set()
            thread.join()
            assert host.tiers_of(1) == ["cpu"]
            assert host.nvme.seeds([1]) == set()
            host.check()

    def test_what_is_read_late_does_not_pass_for_what_was_saved_anew(self):
        with Host(stored=[1]) as host:
            session = host.session()
            reached, go_on, hook = held()
            read = host.nvme._read
            host.nvme._read = lambda *args: (read(*args), hook())[0]
            session.match(keys([1]), 0.0)
            assert reached.wait(10.0)
            host.nvme._read = read
            session.condemn(keys([1]), "bad_checksum")
            host.mover.bring([], CPU).result(10.0)
            assert save(session, [1]) == 1
            assert session.move(keys([1]), NVME, 10.0) == 1
            go_on.set()
            host.mover.drain()
            assert host.tiers_of(1) == ["nvme"]
            assert host.stats.faults == {"bad_checksum": 1}
            host.check()

    def test_its_row_is_nobodys_parent_when_it_is_used_again(self):
        with Host() as host:
            session = host.session()
            save(session, [1, 2])
            row = host.state.row(keys([1])[0])
            session.condemn(keys([1]), "bad_checksum")
            save(session, [9])
            assert host.state.row(keys([9])[0]) == row
            assert host.state.policies[CPU].with_descendants([row]) == [row]

    def test_it_never_raises(self):
        with Host() as host:
            session = host.session()
            save(session, [1])
            host.hierarchy.close()
            session.condemn(keys([1]), "bad_header")


class TestQuarantine:
    def test_reserved_slots_of_a_session_that_ended_wait_for_its_writer(self):
        gone: set[int] = set()
        with Host(blocks=16, nvme=None, limits=PLENTY, writer_gone=gone.__contains__) as host:
            session, other = host.session(), host.session()
            reserved = reserve(session, range(4))
            slots = set(reserved.grants["offset"].tolist())
            session.close()
            granted = reserve(other, range(10, 26))
            assert not slots & set(granted.grants["offset"][granted.grants["state"] == 0].tolist())
            assert host.hierarchy.status()["tiers"][0]["counters"] == {"quarantined": 4}
            gone.add(session._number)
            host.hierarchy._absolve()
            host.mover.drain()
            assert states(reserve(other, range(30, 34))) == [GrantState.GRANTED] * 4

    def test_a_reader_that_lost_its_lease_learns_it_whatever_size_comes_next(self):
        """Cut again for another size, the page where its slot began is in the middle of a new slot."""
        with Host(blocks=16, nvme=None, limits=PLENTY) as host:
            session, other = host.session(), host.session()
            save(session, range(16))
            matched = session.match(keys(range(16)), 0.0)
            session.close()
            assert save(other, [100], 15 * SLOT_NBYTES) == 1
            pages = matched.slots["offset"] // 4096
            moved_on = other.generations()[pages] != matched.slots["generation"]
            assert moved_on.sum() >= 15


class TestFailures:
    def test_the_keeper_survives_its_chores(self):
        with Host(blocks=20, limits=PLENTY) as host:
            failed = threading.Event()

            def grow() -> bool:
                failed.set()
                raise OSError("the arena broke")

            host.state.cpu.grow = grow
            host.mover.kick()
            assert failed.wait(10.0)
            failed.clear()
            assert failed.wait(10.0), "a second round"
            del host.state.cpu.grow
            assert host.stats.faults["keeper_error"] >= 1
            assert host.mover._keeper.is_alive()

    @pytest.mark.parametrize("error", [TierUnavailable("dead"), RuntimeError("a tier must not")])
    @pytest.mark.parametrize("call", ["write", "read", "dropped", "remove", "inventory"])
    def test_a_tier_that_is_gone_is_a_miss_and_leaks_nothing(self, call, error):
        with Host(blocks=20, stored=[50, 51], limits=PLENTY) as host:
            session = host.session()
            host.nvme.hooks[call] = raises(error)
            save(session, range(19))
            session.match(keys([50, 51]), 5.0)
            session.condemn(keys([0]), "bad_header")
            host.mover.drain()
            session.move(keys([1, 2]), NVME, 5.0)
            host.nvme.hooks.clear()
            host.mover.drain()
            assert save(session, range(30, 33)) == 3
            session.close()
            host.check()
            assert host.mover._keeper.is_alive()
            assert not host.stats.faults["keeper_error"] + host.stats.faults["mover_error"]

    def test_a_tier_that_is_gone_at_the_start_is_empty(self):
        with Host(stored=[1]) as host:
            host.nvme.hooks["inventory"] = raises(TierUnavailable("dead"))
            with host.state.lock:
                assert host.state.take_inventory(NVME) == 0
            assert host.stats.faults == {"nvme_unavailable": 1}

    def test_the_status_says_which_tier_is_gone(self):
        with Host(gpu=1 << 20) as host:
            host.nvme.hooks["usage"] = raises(TierUnavailable("nobody answers"))
            tiers = {tier["tier"]: tier for tier in host.session().status()["tiers"]}
            assert tiers["nvme"]["fault"] == "nobody answers"
            assert tiers["gpu"]["fault"] == tiers["cpu"]["fault"] == ""

    def test_a_block_that_a_gone_tier_has_is_not_forgotten(self):
        with Host(stored=[1]) as host:
            session = host.session()
            host.nvme.hooks["read"] = raises(TierUnavailable("dead"))
            assert len(session.match(keys([1]), 5.0).slots) == 0
            host.nvme.hooks.clear()
            assert len(session.match(keys([1]), 5.0).slots) == 1


class TestClosing:
    def test_twice_is_fine_and_the_table_still_answers(self):
        host = Host(stored=[1])
        session = host.session()
        save(session, [2])
        host.hierarchy.close()
        host.hierarchy.close()
        assert len(session.match(keys([2]), 1.0).slots) == 1
        assert len(session.match(keys([1]), 1.0).slots) == 0

    def test_nothing_stays_pending(self):
        host = Host(stored=range(200), limits=PLENTY, blocks=300)
        session = host.session()
        host.nvme.gate.clear()
        staging = host.hierarchy.look(Wish(session._number, keys(range(200)))).staging
        futures: list[Future[int]] = [session.prefetch(keys(range(5)), CPU) for _ in range(3)]
        waiter: list[int] = []
        thread = threading.Thread(target=lambda: waiter.append(len(session.match(keys(range(200)), 30.0).slots)))
        thread.start()
        closing = threading.Thread(target=host.hierarchy.close)
        closing.start()
        while not host.mover._closing.is_set():
            pass
        host.nvme.gate.set()
        closing.join(10.0)
        thread.join(10.0)
        assert not closing.is_alive()
        assert staging.done.done()
        assert all(future.done() for future in futures)
        assert len(waiter) == 1
        assert not host.mover.stager.flying

    def test_what_is_asked_for_later_is_answered(self):
        host = Host(stored=[1], gpu=1 << 20)
        session = host.session()
        save(session, [2])
        host.hierarchy.close()
        assert session.prefetch(keys([1]), CPU).result(1.0) == 0
        assert session.move(keys([1, 2]), NVME, 1.0) == 0
        assert len(session.match(keys([2]), 0.0).slots) == 1
        session.close()


def test_a_parent_is_remembered_with_its_life():
    table = BlockTable()
    parent = table.add(b"p", 1, -1, 0.0)
    child = table.add(b"c", 1, parent, 0.0)
    assert table.parent_of(child) == parent
    table.remove(parent)
    assert table.parent_of(child) is None
    assert table.add(b"q", 1, -1, 0.0) == parent
    assert table.parent_of(child) is None
    assert table.strangers(np.array([parent, child])) == [1]
    table.adopt(child, parent)
    assert table.strangers(np.array([parent, child])) == []


def test_a_table_grows():
    table = BlockTable()
    rows = [table.add(b"%d" % i, i, i - 1, 1.0) for i in range(3000)]
    table.tiers[2999] |= 1 << NVME
    table.tiers[2999] |= 1 << CPU
    assert rows == list(range(3000))
    assert table.nbytes[:3000].tolist() == rows
    assert (table.offset[:3000] == -1).all()
    assert [table.best(row) for row in (0, 2998, 2999)] == [0, 0, CPU]
    assert table.parent_of(2999) == 2998


def test_the_status_adds_up():
    with Host(stored=[5, 6]) as host:
        session = host.session()
        save(session, [1, 2])
        matched = session.match(keys([1, 2, 3]), 0.0)
        reserve(session, [9])
        status = session.status()
        assert {tier["tier"]: tier["blocks"] for tier in status["tiers"]} == {"cpu": 2, "nvme": 2}
        assert (status["blocks"], status["sessions"], status["leases"], status["reservations"]) == (4, 1, 1, 1)
        assert status["leased_nbytes"] == 2 * SLOT_NBYTES
        assert status["hit_ratio"] == pytest.approx(2 / 3)
        session.release(matched.lease, 0.003)
        session.commit(99, [], seconds=0.2)
        seconds = session.status()["seconds"]
        assert {what: one["count"] for what, one in seconds.items()} == {"match": 1, "load": 1, "save": 1}
        assert host.hierarchy.inspect(keys([1]))[0]["nbytes"] == NBYTES


def test_what_was_asked_for_is_not_the_next_to_leave():
    with Host(nvme=64) as host:
        session = host.session()
        save(session, [1, 2])
        save(session, [3, 4])
        assert session.prefetch(keys([1, 2]), TierNumber.CPU).result(5) == 2
        victims = host.state.policies[TierNumber.CPU].victims(2 * SLOT_NBYTES, lambda _: False)
        assert [host.state.table.keys[row] for row in victims] == keys([4, 3])


def test_what_is_here_already_does_not_make_room_for_the_rest():
    with Host(blocks=8, limits=replace(PLENTY, high=1.0, low=1.0)) as host:
        session = host.session()
        save(session, range(4))
        assert session.move(keys([2, 3]), NVME, 5.0) == 2
        save(session, range(10, 16))
        assert session.prefetch(keys(range(4)), CPU).result(5) == 4
        assert all("cpu" in host.tiers_of(seed) for seed in range(4))

"""The block table after a tier was away, while other things go on."""

from __future__ import annotations

import threading

from kvtier.tiers.base import TierNumber
from kvtier_services.actors.reconcile import reconcile
from tests.hierarchy_fixture import Host, keys, save

NVME = TierNumber.NVME


def test_what_it_kept_is_learned_and_what_it_lost_forgotten():
    with Host() as host:
        session = host.session()
        save(session, [1, 2, 3])
        session.move(keys([1, 2, 3]), NVME, 5.0)
        host.nvme.evict(2)
        host.nvme.evicted.clear()
        assert reconcile(host.state, NVME) == (2, 1)
        assert [host.tiers_of(seed) for seed in (1, 2, 3)] == [["nvme"], [], ["nvme"]]
        host.check()


def test_what_is_dropped_meanwhile_stays_dropped():
    with Host(stored=range(4)) as host:
        inventory = host.nvme.inventory

        def and_then_evict():
            found = inventory()
            host.hierarchy.evict(keys([1]))
            return found

        host.nvme.inventory = and_then_evict
        assert reconcile(host.state, NVME) == (4, 0)
        assert [host.tiers_of(seed) for seed in range(4)] == [["nvme"], [], ["nvme"], ["nvme"]]
        host.check()


def test_what_is_written_meanwhile_is_not_taken_for_lost():
    with Host() as host:
        session = host.session()
        save(session, [1])
        inventory, moving = host.nvme.inventory, []

        def while_it_is_moved():
            found = inventory()
            moving.append(threading.Thread(target=session.move, args=(keys([1]), NVME, 10.0)))
            moving[0].start()
            moving[0].join(0.2)
            return found

        host.nvme.inventory = while_it_is_moved
        reconcile(host.state, NVME)
        moving[0].join(10.0)
        assert host.tiers_of(1) == ["nvme"]
        host.check()

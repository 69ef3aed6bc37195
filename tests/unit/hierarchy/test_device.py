"""Blocks that are read in the GPU tier's memory: what the host knows of them, and when it lets them go."""

from __future__ import annotations

import pytest

from kvtier.client.local import LocalSession
from kvtier.hierarchy import transfer
from kvtier.hierarchy.loading import Wish
from kvtier.memory.arena import Arena
from kvtier.testing.device import GPU_CAPACITY, attached, gpu_host, holds_inside, promoted
from kvtier.testing.session import CAPACITY, NBYTES, PATIENCE, chain
from kvtier.tiers.base import TierNumber
from kvtier.tiers.gpu import GpuTier
from kvtier_services.actors.reconcile import reconcile


@pytest.fixture
def host():
    with gpu_host(Arena.private(CAPACITY)) as host:
        yield host


@pytest.fixture
def session(host):
    return LocalSession(host.hierarchy)


def test_a_match_asks_nobody(host, session, monkeypatch):
    promoted(session, 0, 4)
    epoch = attached(session).epoch
    for call in ("places", "contains", "inventory", "usage", "read", "write"):
        monkeypatch.setattr(host.gpu, call, lambda *_: pytest.fail("the GPU tier was asked"))
    matched = session.match(chain(0, 4), 0.0, device=epoch)
    assert matched.inside.all()
    session.release(matched.lease)


def test_a_block_that_two_read_goes_after_the_second(host, session):
    promoted(session, 0, 1)
    epoch = attached(session).epoch
    leases = [session.match(chain(0, 1), 0.0, device=epoch).lease for _ in range(2)]
    session.evict(chain(0, 1))
    session.release(leases[0])
    transfer.remove_unread(host.hierarchy.state)
    assert host.gpu.contains(chain(0, 1)) == [True]
    session.release(leases[1])
    session.release(leases[1])
    transfer.remove_unread(host.hierarchy.state)
    assert host.gpu.contains(chain(0, 1)) == [False]


def test_what_is_read_in_the_gpu_tier_leaves_the_arena_to_others(host, session):
    promoted(session, 0, 2)
    matched = session.match(chain(0, 2), 0.0, device=attached(session).epoch)
    state = host.hierarchy.state
    assert not any(state.pinned(row) for row in state.rows(chain(0, 2)))
    assert state.ledger.leases[matched.lease].nbytes == 2 * 20_480
    assert NBYTES < 20_480


def test_a_host_that_begins_again_hears_where_blocks_are(host, session):
    """The GPU tier's process outlives the CPU tier's."""
    promoted(session, 0, 3)
    memory = attached(session)
    state = host.hierarchy.state
    state.table.inside[:] = -1
    assert not session.match(chain(0, 3), 0.0, device=memory.epoch).inside.any()
    reconcile(state, TierNumber.GPU)
    matched = session.match(chain(0, 3), 0.0, device=memory.epoch)
    assert matched.inside.all()
    assert holds_inside(memory, matched, 0)


def test_what_is_on_its_way_out_does_not_come_back_with_an_inventory(host, session):
    promoted(session, 0, 2)
    matched = session.match(chain(0, 2), 0.0, device=attached(session).epoch)
    session.evict(chain(0, 2))
    reconcile(host.hierarchy.state, TierNumber.GPU)
    assert session.inspect(chain(0, 2)) == [None, None]
    session.release(matched.lease)
    transfer.remove_unread(host.hierarchy.state)
    assert host.gpu.usage().used == 0


def test_another_life_of_the_gpu_tier_is_other_memory(host, session):
    promoted(session, 0, 3)
    memory = attached(session)
    old = session.match(chain(0, 3), 0.0, device=memory.epoch)
    host.gpu.close()
    state = host.hierarchy.state
    again = GpuTier(GPU_CAPACITY, host.hierarchy.arena, device="cpu")
    state.tiers[TierNumber.GPU] = state.device._tier = again
    reconcile(state, TierNumber.GPU)
    assert not memory.current
    session.release(old.lease)
    found = session.match(chain(0, 3), 0.0, device=memory.epoch)
    assert (len(found.slots), found.inside.any(), found.device) == (3, False, again.epoch)
    assert session.prefetch(chain(0, 3), TierNumber.GPU).result(PATIENCE) == 3
    new = attached(session)
    found = session.match(chain(0, 3), 0.0, device=new.epoch)
    assert found.inside.all()
    assert holds_inside(new, found, 0)


def test_places_of_a_life_that_is_over_are_not_learned(host, session):
    promoted(session, 0, 2)
    state = host.hierarchy.state
    places = host.gpu.places(chain(0, 2))
    state.table.inside[:] = -1
    with state.lock:
        state.device.learn(chain(0, 2), type(places)(places.epoch + 2, places.slots))
    assert (state.table.inside == -1).all()


def test_a_first_look_that_leased_counts_its_blocks_as_the_gpus(host, session):
    promoted(session, 0, 2)
    epoch = attached(session).epoch
    host.hierarchy.match(Wish(session._number, chain(0, 2), device=epoch))
    assert host.hierarchy.status()["hits"] == {"gpu": 2}


def test_room_is_made_of_what_nobody_reads(host, session):
    promoted(session, 0, 20)
    promoted(session, 100, 20)
    matched = session.match(chain(0, 20), 0.0, device=attached(session).epoch)
    session.release(session.match(chain(100, 20), 0.0).lease)  # the others are older now
    promoted(session, 200, 20)
    tiers = [block["tiers"] for block in session.inspect(chain(0, 20))]
    assert tiers == [["gpu", "cpu"]] * 20
    assert not host.hierarchy.state.device.leaving
    session.release(matched.lease)

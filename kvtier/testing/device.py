"""What every `Session` must pass whose host has a GPU tier with memory that can be attached.

Subclass `DeviceKit` and give two pytest fixtures: `host`, of `gpu_host` over an arena of `CAPACITY` bytes, and
`open_session` as for `SessionKit`; and set `device` to that of the host's GPU tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.block import PAGE, verify_payload
from kvtier.client.reading import on_host
from kvtier.client.session import Session
from kvtier.hierarchy.answers import Matched
from kvtier.hierarchy.cache import Hierarchy
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.memory.device import DeviceMemory
from kvtier.testing.payloads import key_of
from kvtier.testing.session import PATIENCE, OpenSession, chain, eventually, save
from kvtier.tiers.base import TierNumber
from kvtier.tiers.gpu import GpuTier

GPU_CAPACITY = 1 << 20


@dataclass(frozen=True)
class GpuHost:
    """A hierarchy with two tiers: the arena, and a GPU tier."""

    hierarchy: Hierarchy
    gpu: GpuTier


@contextmanager
def gpu_host(arena: Arena, device: str = "cpu") -> Iterator[GpuHost]:
    """A host for the kit."""
    gpu = GpuTier(GPU_CAPACITY, arena, device)
    store = LocalStore()
    hierarchy = Hierarchy(arena, {TierNumber.GPU: gpu}, LocalIndex(store, store.register("kit")))
    try:
        yield GpuHost(hierarchy, gpu)
    finally:
        hierarchy.close()


def attached(session: Session, device: str = "cpu") -> DeviceMemory:
    """The GPU tier's memory."""
    memory = session.attach(device)
    assert isinstance(memory, DeviceMemory), memory
    return memory


def promoted(session: Session, first: int, count: int) -> None:
    """Store a chain and bring it to the GPU tier too."""
    assert save(session, first, count) == count
    assert session.prefetch(chain(first, count), TierNumber.GPU).result(PATIENCE) == count


def holds_inside(memory: DeviceMemory, matched: Matched, first: int) -> bool:
    """Whether the leased slots in the GPU tier's memory hold what the seeds say, under the generations of the lease."""
    for i, slot in enumerate(matched.slots):
        offset, nbytes = int(slot["offset"]), int(slot["nbytes"])
        if matched.inside[i]:
            payload = on_host(memory.memory, offset, nbytes)
            verify_payload(payload.data, expected=key_of(first + i))
            if memory.generations[offset // PAGE] != slot["generation"]:
                return False
    return True


class DeviceKit:
    """Laws of reading the GPU tier's memory in place; `device` is where that is."""

    device = "cpu"

    def test_who_attached_it_gets_slots_there(self, open_session: OpenSession) -> None:
        writer, reader = open_session(), open_session()
        promoted(writer, 0, 5)
        memory = attached(reader, self.device)
        matched = reader.match(chain(0, 6), 0.0, device=memory.epoch)
        assert matched.inside.tolist() == [True] * 5
        assert matched.tiers.tolist() == [TierNumber.GPU] * 5
        assert matched.device == memory.epoch
        assert holds_inside(memory, matched, 0)

    def test_who_did_not_gets_slots_of_the_arena(self, open_session: OpenSession) -> None:
        session = open_session()
        promoted(session, 0, 3)
        memory = attached(session, self.device)
        for device in (0, memory.epoch + 2):
            matched = session.match(chain(0, 3), 0.0, device=device)
            assert not matched.inside.any()
            assert matched.tiers.tolist() == [TierNumber.CPU] * 3
            assert matched.device == memory.epoch

    def test_a_chain_may_lie_in_both(self, open_session: OpenSession) -> None:
        session = open_session()
        promoted(session, 0, 2)
        assert save(session, 2, 2) == 2
        memory = attached(session, self.device)
        matched = session.match(chain(0, 4), 0.0, device=memory.epoch)
        assert matched.inside.tolist() == [True, True, False, False]
        assert holds_inside(memory, matched, 0)

    def test_what_only_the_gpu_tier_has_need_not_be_staged(self, open_session: OpenSession) -> None:
        session = open_session()
        promoted(session, 0, 3)
        memory = attached(session, self.device)
        assert session.move(chain(0, 3), TierNumber.GPU, PATIENCE) == 3
        matched = session.match(chain(0, 3), 0.0, device=memory.epoch)
        assert (len(matched.slots), matched.staging) == (3, 0)
        assert holds_inside(memory, matched, 0)

    def test_a_leased_slot_stays_until_it_is_released(self, open_session: OpenSession, host: GpuHost) -> None:
        session, other = open_session(), open_session()
        promoted(session, 0, 4)
        memory = attached(session, self.device)
        matched = session.match(chain(0, 4), 0.0, device=memory.epoch)
        assert other.evict(chain(0, 4)) == 4
        assert other.match(chain(0, 4), 0.0, device=memory.epoch).lease == 0
        for first in range(100, 180, 20):
            assert save(other, first, 20) == 20
            other.prefetch(chain(first, 20), TierNumber.GPU).result(PATIENCE)
            assert holds_inside(memory, matched, 0)
        assert host.gpu.contains(chain(0, 4)) == [True] * 4
        session.release(matched.lease)
        assert eventually(lambda: not any(host.gpu.contains(chain(0, 4))))

    def test_a_key_that_its_readers_keep_is_not_taken_for_a_new_one(
        self, open_session: OpenSession, host: GpuHost
    ) -> None:
        session = open_session()
        promoted(session, 0, 2)
        memory = attached(session, self.device)
        old = session.match(chain(0, 2), 0.0, device=memory.epoch)
        session.condemn(chain(0, 2), "bad_header")
        assert eventually(lambda: session.inspect(chain(0, 2)) == [None, None])
        assert eventually(lambda: save(session, 0, 2) == 2)
        assert session.prefetch(chain(0, 2), TierNumber.GPU).result(PATIENCE) == 0
        session.release(old.lease)
        assert eventually(lambda: not any(host.gpu.contains(chain(0, 2))))
        assert session.prefetch(chain(0, 2), TierNumber.GPU).result(PATIENCE) == 2
        new = session.match(chain(0, 2), 0.0, device=memory.epoch)
        assert new.inside.all()
        assert (new.slots["generation"] != old.slots["generation"]).all() or (
            new.slots["offset"] != old.slots["offset"]
        ).all()

    def test_the_end_of_a_session_is_the_end_of_its_leases(self, open_session: OpenSession, host: GpuHost) -> None:
        gone, other = open_session(), open_session()
        promoted(gone, 0, 3)
        gone.match(chain(0, 3), 0.0, device=attached(gone, self.device).epoch)
        assert other.evict(chain(0, 3)) == 3
        gone.close()
        assert eventually(lambda: host.gpu.usage().used == 0)

    def test_a_slot_that_is_granted_again_has_another_generation(
        self, open_session: OpenSession, host: GpuHost
    ) -> None:
        session = open_session()
        promoted(session, 0, 2)
        memory = attached(session, self.device)
        old = session.match(chain(0, 2), 0.0, device=memory.epoch)
        session.release(old.lease)
        session.evict(chain(0, 2))
        assert eventually(lambda: not any(host.gpu.contains(chain(0, 2))))
        promoted(session, 50, 8)
        assert (memory.generations[old.slots["offset"] // PAGE] != old.slots["generation"]).any()

    def test_memory_that_is_its_owners_no_more_is_not_leased(self, open_session: OpenSession, host: GpuHost) -> None:
        session = open_session()
        promoted(session, 0, 2)
        memory = attached(session, self.device)
        host.gpu.close()
        assert not memory.current
        matched = session.match(chain(0, 2), 0.0, device=memory.epoch)
        assert (len(matched.slots), matched.device) == (2, 0)
        assert not matched.inside.any()

"""The GPU tier on a device: the laws of tiers and of sessions, and its memory in two processes. Hardware only."""

from __future__ import annotations

import signal
from functools import cache

import numpy as np
import pytest
import torch

from kvtier.client.local import LocalSession
from kvtier.memory import cuda
from kvtier.memory.arena import Arena
from kvtier.memory.device import DeviceArena, attach
from kvtier.memory.filling import STEP
from kvtier.memory.pinning import Pinner
from kvtier.testing.device import DeviceKit, gpu_host
from kvtier.testing.session import CAPACITY
from kvtier.testing.tier import Desk, TierKit
from kvtier.tiers.gpu import GpuTier
from tests.device_child import TOKENS, tokens_of
from tests.gpu.kit import DEVICE
from tests.shared_fixture import PATIENCE, empty, engine, eventually, host_with, load, opened, promoted

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="for hardware")
PLACE = "cuda:0"


@cache
def pinned(capacity: int) -> Arena:
    """Kept for good: an address that is given back while it is page-locked cannot be page-locked again."""
    arena = Arena.private(capacity)
    pin = Pinner(pytest.fail)
    for start in range(0, arena.capacity, STEP):
        pin(arena.memory[start : start + STEP])
    return arena


class TestTier(TierKit):
    @pytest.fixture
    def make_tier(self):
        return lambda arena, capacity: GpuTier(capacity, arena, PLACE)

    def test_is_labelled(self, desk):
        assert desk.tier.label == "gpu"


class TestTierOverPinnedMemory(TestTier):
    @pytest.fixture
    def arena(self):
        return pinned(16 << 20)


def test_copies_across_two_parts_that_are_pinned_apart():
    arena = pinned(2 * STEP)
    desk = Desk(GpuTier(8 << 20, arena, PLACE), arena, begin=STEP - 64 * 4096)
    assert desk.write(range(20), 70_000) == [True] * 20
    assert desk.read(range(20)[::-1]) == [True] * 20
    desk.tier.close()


class TestSession(DeviceKit):
    device = PLACE

    @pytest.fixture
    def host(self):
        with gpu_host(Arena.private(CAPACITY), PLACE) as host:
            yield host

    @pytest.fixture
    def open_session(self, host):
        opened = []

        def open_session():
            opened.append(LocalSession(host.hierarchy))
            return opened[-1]

        yield open_session
        for session in opened:
            session.close()


def test_memory_of_the_driver_is_a_tensor_and_is_given_back():
    device = torch.device(PLACE)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(device)[0]
    memory = cuda.allocate(1 << 30, device)
    memory.fill_(7)
    assert int(memory[123:125].sum()) == 14
    assert before - torch.cuda.mem_get_info(device)[0] >= 1 << 30
    del memory
    assert torch.cuda.mem_get_info(device)[0] >= before - (64 << 20)


def test_what_the_driver_refuses_is_said():
    with pytest.raises(cuda.CudaRefused, match="OUT_OF_MEMORY"):
        cuda.allocate(1 << 50, torch.device(PLACE))
    with pytest.raises(cuda.CudaRefused, match="cuIpcOpenMemHandle answered CUDA_ERROR"):
        cuda.open_exported(bytes(64), 4096, torch.device(PLACE))


def test_a_handle_of_memory_that_is_gone_is_refused(tmp_path):
    arena = Arena.own(tmp_path / "arena", 1 << 20)
    memory = DeviceArena(1 << 20, torch.device(PLACE), tmp_path / "arena")
    handle = memory.share()
    memory.close()
    del memory
    why = attach(handle, PLACE)
    assert isinstance(why, str)
    assert why
    arena.close()


@pytest.fixture
def host():
    with host_with(PLACE) as host:
        yield host


def test_an_engine_in_another_process_reads_it_in_place(host):
    """This process has the door, another the GPU tier: what is attached here is behind an IPC handle."""
    with opened(host) as space:
        kv = promoted(space, 0)
        assert load(host, space, 0)[1] == {"cpu": TOKENS}
        host.arena.memory[:] = 0xA5
        count, tiers, out = load(host, space, 0)
        assert (count, tiers) == (TOKENS, {"gpu": TOKENS})
        assert np.array_equal(out, kv)
        assert "device_refused" not in host.hierarchy.status()["faults"]


def test_its_bytes_outlive_the_process_that_owned_it(host):
    with opened(host) as space:
        kv = promoted(space, 0)
        load(host, space, 0)
        with space.match(tokens_of(0)) as hit:
            assert hit.tiers == {"gpu": TOKENS}
            host.worker.process.send_signal(signal.SIGKILL)
            host.worker.process.wait(PATIENCE)
            out = empty(host)
            assert hit.load(out) == TOKENS
            assert np.array_equal(out.cpu().numpy(), kv)


def test_a_successor_is_attached_in_its_place(host):
    with opened(host) as space:
        kv = promoted(space, 0)
        load(host, space, 0)
        with space.match(tokens_of(0)) as held:
            host.restart_worker()
            assert held.load(empty(host)) == 0
        assert load(host, space, 0)[:2] == (TOKENS, {"cpu": TOKENS})
        assert space.prefetch(tokens_of(0), tier="gpu").result(PATIENCE) == 4
        count, tiers, out = load(host, space, 0)
        assert (count, tiers) == (TOKENS, {"gpu": TOKENS})
        assert np.array_equal(out, kv)


def test_under_load_no_byte_is_wrong(host):
    with engine(host, 1) as one, engine(host, 2) as two, opened(host) as space:
        for round_ in range(40):
            space.prefetch(tokens_of(round_ % 12), tier="gpu").result(PATIENCE)
            space.evict(tokens_of(round_ * 5 % 12))
            if round_ == 20:
                host.restart_worker()
        before = host.hierarchy.status()["hits"].get("gpu", 0)
        assert eventually(lambda: host.hierarchy.status()["hits"].get("gpu", 0) > before + 20)
        for said in (one.ends(), two.ends()):
            assert said["wrong"] == 0
            assert said["served"]["gpu"] > 0

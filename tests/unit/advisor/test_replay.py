"""A host without memory finds what a host would find."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvtier.advisor.models import spec_of
from kvtier.advisor.replay import Host, Outcome, Setup, replay, why_not
from kvtier.advisor.trace import Request, ceiling
from kvtier.block import PAGE
from kvtier.errors import ConfigError
from kvtier.hierarchy.limits import Limits
from tests.unit.advisor.traces import chats, conversation, of_one_page

MIB = 1 << 20


def one_tier(trace: Sequence[Request], blocks: int, policy: str = "lru") -> Outcome:
    """A CPU tier of so many blocks and nothing else, all of it for saves, no session limited."""
    nbytes = blocks * PAGE
    host = Host(of_one_page(), Setup(nbytes, policy=policy), Limits(nbytes, nbytes, staging_reserve=0.0))
    for request in trace:
        host.ask(request)
    outcome = host.outcome(trace)
    host.close()
    return outcome


def lru(trace: Sequence[Request], blocks: int) -> float:
    """The hit ratio of prefixes in an ordered dict, whose chains are used from their tails to their heads."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for request in trace:
        found += next((i for i, block in enumerate(request.blocks) if block not in cache), len(request.blocks))
        for block in reversed(request.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return found / sum(len(request.blocks) for request in trace)


@pytest.mark.parametrize("blocks", [500, 2000])
def test_one_tier_is_lru(blocks):
    """Against another implementation, on the beginning of the conversation trace."""
    trace = conversation()[:500]
    outcome = one_tier(trace, blocks)
    assert outcome.hit_ratio == pytest.approx(lru(trace, blocks), abs=0.001)
    assert outcome.hits == {"cpu": round(outcome.hit_ratio * outcome.asked)}
    assert outcome.unsaved == 0


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "expected"), [(2_000, 0.054), (10_000, 0.212), (50_000, 0.355)])
def test_the_figures_of_the_conversation_trace(blocks, expected):
    """They were found by another program, and came with the trace."""
    assert one_tier(conversation(), blocks).hit_ratio == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize("policy", ["lru", "fifo", "s3fifo", "cost"])
def test_with_room_for_everything_nothing_is_forgotten(policy):
    trace = chats(20)
    assert one_tier(trace, 2000, policy).hit_ratio == ceiling(trace)


def two_tiers(trace: Sequence[Request], **setup) -> Outcome:
    """Room for a few conversations in memory and for all on NVMe, if no less is said."""
    host = Host(of_one_page(), Setup(**{"cpu": 128 * PAGE, "nvme": 64 * MIB} | setup))
    for request in trace:
        host.ask(request)
    outcome = host.outcome(trace)
    host.close()
    return outcome


def test_what_memory_has_no_room_for_is_found_on_nvme():
    trace = chats(40)
    outcome = two_tiers(trace)
    without = two_tiers(trace, nvme=0)
    assert outcome.hit_ratio == ceiling(trace) > 2 * without.hit_ratio
    assert outcome.hits["nvme"] > outcome.hits["cpu"] > 0
    assert outcome.moved_nbytes["nvme", "cpu"] == outcome.hits["nvme"] * PAGE
    assert outcome.nvme["read_nbytes"] == outcome.moved_nbytes["nvme", "cpu"]
    assert outcome.moved_nbytes["cpu", "nvme"] == outcome.nvme["payload_nbytes"]
    assert outcome.nvme["evicted"] == 0
    assert without.moved_nbytes == {}
    assert without.unsaved == outcome.unsaved == 0


def test_writes_are_counted_with_all_that_goes_with_them():
    """A frame of a page to each payload of a page: at least two bytes are written for one."""
    outcome = two_tiers(chats(40))
    assert 2.0 <= outcome.write_amplification < 2.5
    assert outcome.written_a_day == pytest.approx(outcome.nvme["device_nbytes"] / outcome.seconds * 86_400)


def test_a_gpu_tier_is_room_too():
    trace = chats(40)
    with_gpu, without = two_tiers(trace, nvme=0, gpu=256 * PAGE), two_tiers(trace, nvme=0)
    assert with_gpu.hit_ratio > without.hit_ratio
    assert with_gpu.hits["gpu"] > 0
    assert with_gpu.moved_nbytes["cpu", "gpu"] > 0


def test_a_full_nvme_tier_is_written_to_as_its_rule_says():
    trace = chats(150)
    outcomes = {rule: two_tiers(trace, nvme=4 * MIB, admission=rule) for rule in ("all", "second")}
    assert outcomes["all"].refused == {}
    assert outcomes["second"].refused["first_sight"] > 0
    assert outcomes["second"].nvme["payload_nbytes"] < outcomes["all"].nvme["payload_nbytes"]
    assert outcomes["all"].nvme["evicted"] > 0


def test_an_endurance_budget_is_kept():
    trace = chats(150)
    free = two_tiers(trace)
    budget = int(free.written_a_day / 10)
    bound = two_tiers(trace, endurance=budget)
    assert bound.refused["endurance"] > 0
    hour = budget / 24
    assert bound.nvme["device_nbytes"] <= hour + budget / 86_400 * bound.seconds + 64 * PAGE
    assert bound.hit_ratio < free.hit_ratio


def test_a_replay_gives_the_same_each_time():
    trace = chats(60)
    assert two_tiers(trace, nvme=4 * MIB, gpu=64 * PAGE) == two_tiers(trace, nvme=4 * MIB, gpu=64 * PAGE)


def test_a_prompt_that_is_larger_than_the_tier_is_saved_as_far_as_it_fits():
    trace = [Request(0.0, tuple(range(300))), Request(1.0, tuple(range(300)))]
    outcome = two_tiers(trace, nvme=0)
    assert outcome.unsaved > 0
    assert 0 < outcome.hits["cpu"] < 128


def test_the_same_memory_holds_more_under_a_smaller_plan():
    trace = conversation()[:800]
    setup = Setup(32 << 30, model="llama-3.1-8b")
    raw, int8, int4 = (replay(trace, replace(setup, plan=plan)).hit_ratio for plan in ("raw", "int8", "int4"))
    assert raw < int8 < int4
    # int8 takes 1.91 times less: 8 bits and 16 for each 64, in place of 16
    assert int8 == pytest.approx(replay(trace, Setup(int(1.91 * (32 << 30)))).hit_ratio, abs=0.005)


def test_bytes_are_those_of_the_trace_and_not_of_the_engines_blocks():
    """A block of 512 tokens of llama-3.1-8b has 64 MiB, whatever it is divided by inside."""
    trace = chats(12)
    outcome = replay(trace, Setup(8 << 30, nvme=512 << 30))
    block = 512 * 131_072
    # A few blocks come up that the CPU tier has no room left for when they are leased.
    assert outcome.moved_nbytes["nvme", "cpu"] == pytest.approx(outcome.hits["nvme"] * block, rel=0.1)
    assert outcome.nvme["payload_nbytes"] == pytest.approx(outcome.moved_nbytes["cpu", "nvme"])


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        (
            Setup(100 * MIB),
            "a CPU tier of 104,857,600 bytes is too small: a block of 512 tokens of llama-3.1-8b has 67,",
        ),
        (Setup(1 << 30, nvme=100 * MIB), "an NVMe tier of 104,857,600 bytes is too small: .* give it at least 5"),
        (Setup(1 << 30, plan="int7"), "no plan 'int7'"),
        (Setup(1 << 30, policy="mru"), "no eviction policy 'mru'"),
        (Setup(1 << 30, admission="never"), "nvme.admission is 'never'"),
        (Setup(1 << 30, model="gpt-2000"), "no model 'gpt-2000'"),
    ],
)
def test_what_cannot_be_is_said(setup, says):
    with pytest.raises(ConfigError, match=says):
        replay(chats(2), setup)


def test_the_least_nvme_that_is_said_is_enough():
    spec = spec_of("llama-3.1-8b", 512)
    said = why_not(Setup(1 << 30, nvme=1), spec)
    least = int(said.split("at least ")[1].split(", or")[0].replace(",", ""))
    assert not why_not(Setup(1 << 30, nvme=least), spec)
    outcome = replay(chats(10), Setup(1 << 30, nvme=least))
    assert outcome.nvme["payload_nbytes"] > 0

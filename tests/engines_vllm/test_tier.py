"""kvtier as a secondary tier of vLLM's own offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.connectors.vllm.tier_lookup import LONGEST, Pins
from tests.engines_vllm.engine import PAGE, Answer, Engine
from tests.engines_vllm.host import Host
from tests.engines_vllm.prompts import A, B, C, blocks, loadable, local

Start = Callable[..., Engine]
PROMPTS = (A, B, C)
FOUND = [loadable(prompt, PAGE) for prompt in PROMPTS]
ALONE = [local(A), local(B, A), local(C, A, B)]
"""Tokens that vLLM finds in its own pool when it has computed the prompts before."""
CHUNK = 4 * 2 * 4 * 32 * PAGE * 4
"""Bytes: layers, K and V, heads, elements, tokens, float32."""


def tiered(host: Host | Path, **options: Any) -> dict[str, Any]:
    tier = {"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm", "revision": "1"}
    tier |= {"target": str(getattr(host, "socket", host))}
    extra = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines_vllm.tier_spec"}
    extra |= {"cpu_bytes_to_use": options.pop("room", 64 << 20), "secondary_tiers": [tier | options]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.fixture
def tier(llama: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts engines with the tier."""
    engines: list[Engine] = []

    def begin(host: Host | Path, **options: Any) -> Engine:
        log = tmp_path / f"tier{len(engines)}.log"
        engines.append(Engine(llama, log, kv_transfer_config=tiered(host, **options)))
        engines[-1]._hear()
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def answers(engine: Engine) -> list[Answer]:
    """To one prompt after the other."""
    return [answer for prompt in PROMPTS for answer in engine.generate(prompt)]


def tokens(found: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in found]


def cached(found: list[Answer]) -> list[int]:
    return [answer.cached for answer in found]


@pytest.fixture(scope="module")
def plain(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM answers by itself."""
    engine = Engine(llama, tmp_path_factory.mktemp("plain") / "log").ready()
    found = tokens(answers(engine))
    engine.close()
    return found


def test_a_second_engine_finds_what_the_first_offloaded(host, tier, plain):
    first = tier(host)
    found = answers(first)
    assert (tokens(found), cached(found)) == (plain, ALONE)
    host.has(blocks(*PROMPTS, block=PAGE))
    first.close()
    second = tier(host)
    found = answers(second)
    assert (tokens(found), cached(found)) == (plain, FOUND)
    assert second.external() == (sum(map(len, PROMPTS)) - ALONE[1], sum(FOUND) - ALONE[1])
    assert host.tell("status")["lookups"] == {"miss": 3, "full": 3}, "each prompt of each engine once"
    second.close()
    host.idle()


def test_what_is_on_nvme_is_found_too(host, tier, plain):
    first = tier(host)
    answers(first)
    count = blocks(*PROMPTS, block=PAGE)
    host.has(count)
    assert host.tell("demote") == count
    found = answers(tier(host))
    assert (tokens(found), cached(found)) == (plain, FOUND)


def test_bytes_that_rotted_on_nvme_are_computed(host, tier, plain):
    first = tier(host)
    answers(first)
    count = blocks(*PROMPTS, block=PAGE)
    host.has(count)
    assert host.tell("demote") == count
    assert host.tell("rot") == count
    found = answers(tier(host))
    assert (tokens(found), cached(found)) == (plain, ALONE)


def test_the_tokens_hang_on_the_bytes(host, tier, plain):
    """Nobody verifies what lies in the arena: bytes spoiled there are loaded, and answers differ."""
    answers(tier(host))
    count = blocks(*PROMPTS, block=PAGE)
    host.has(count)
    assert host.tell("spoil") == count
    found = answers(tier(host))
    assert cached(found) == FOUND
    assert all(one != other for one, other in zip(tokens(found), plain, strict=True))


def test_a_host_that_dies_is_missed_and_found_again(host, tier, plain):
    engine = tier(host)
    assert tokens([*engine.generate(A), *engine.generate(B)]) == plain[:2]
    host.has(blocks(A, B, block=PAGE))
    host.kill()
    assert tokens(engine.generate(C)) == plain[2:]
    host.start()
    second = tier(host)
    assert tokens(answers(second)) == plain


def test_an_engine_starts_without_a_host(tier, tmp_path, plain):
    engine = tier(tmp_path / "door.sock")
    found = answers(engine)
    assert (tokens(found), cached(found)) == (plain, ALONE)
    reasons = {labels["reason"] for _, labels, value in engine.do("series", prefix="vllm:kv_offload_kvtier") if value}
    assert reasons == {"store_unavailable"}


def test_what_vllms_own_memory_has_no_room_for_comes_back(host, tier, plain):
    """Its memory takes 40 of 49 chunks: what it dropped is loaded again, whatever it drops for that."""
    engine = tier(host, room=40 * CHUNK)
    assert tokens(answers(engine)) == plain
    host.has(blocks(*PROMPTS, block=PAGE))
    before = host.tell("status")["hits"].get("cpu", 0)
    for _ in range(2):
        assert engine.do("reset")
        assert tokens(answers(engine)) == plain
    assert host.tell("status")["hits"]["cpu"] > before
    host.idle()


def test_requests_at_once_and_requests_that_are_given_up(host, tier, plain):
    """Whoever hangs up while chunks are looked for, or loaded, leaves no lease behind."""
    answers(tier(host))
    host.has(blocks(*PROMPTS, block=PAGE))
    second = tier(host)
    gone = second.do("begin", prompts=[A, B, C, A[:500], B[:700]])
    second.do("step", count=2)
    second.do("abort", names=gone[:3])
    second.do("step", count=1)
    second.do("abort", names=gone[3:])
    found = second.generate(*PROMPTS)
    assert tokens(found) == plain
    assert [answer.cached for answer in found] == FOUND
    host.idle()


class Leased:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_leases_end_with_their_request_with_their_load_or_in_time():
    now = [0.0]
    pins, hits = Pins(lambda: now[0]), [Leased() for _ in range(5)]
    pins.begin("a")
    pins.hold("a", hits[0])
    assert pins.take("a") == [hits[0]]
    pins.hold("a", hits[1])
    pins.end("a")
    assert not hits[0].closed, "its load closes it"
    assert hits[1].closed
    pins.hold("a", hits[2])
    assert hits[2].closed, "found when its request had ended"
    pins.begin("b")
    pins.hold("b", hits[3])
    now[0] = LONGEST
    pins.hold("b", hits[4])
    pins.sweep()
    assert not hits[3].closed
    now[0] += 1.0
    pins.sweep()
    assert (hits[3].closed, hits[4].closed) == (True, False)
    pins.close()
    assert hits[4].closed

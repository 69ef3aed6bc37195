"""Whatever fails on kvtier's side, requests are answered, and with the same tokens."""

from __future__ import annotations

import time

import pytest

from tests.engines_vllm.conftest import Alone, Start
from tests.engines_vllm.engine import Answer, Engine, again, transfer
from tests.engines_vllm.host import Host, eventually
from tests.engines_vllm.prompts import A, B, C, blocks, loadable, words

PROMPTS = (A, B, C)
POLICIES = ("recompute", "fail")


def stored(wanted: list[list[int]]) -> int:
    return blocks(*(prompt + tokens[:-1] for prompt, tokens in zip(PROMPTS, wanted, strict=True)))


def right(answers: list[Answer], wanted: list[list[int]]) -> None:
    assert [answer.finish for answer in answers] == ["length"] * len(wanted)
    assert [answer.tokens for answer in answers] == wanted


@pytest.mark.parametrize("policy", POLICIES)
def test_kvtier_is_killed_and_comes_back(start: Start, alone: Alone, llama, host: Host, policy: str) -> None:
    wanted = alone(llama, *PROMPTS, max_tokens=40)
    engine = start(llama, kv_transfer_config=transfer(host, policy=policy))
    engine.generate(*PROMPTS, max_tokens=40)
    host.has(stored(wanted))

    for steps in range(4):
        engine.do("reset")
        names = engine.do("begin", prompts=PROMPTS, max_tokens=40)
        done = engine.do("step", count=steps)
        host.kill()
        done |= engine.do("finish")
        right([Answer(**done[name]) for name in names], wanted)
        # While it is gone everything is computed.
        engine.do("reset")
        answers = engine.generate(*PROMPTS, max_tokens=40)
        right(answers, wanted)

        # It comes back with an empty memory, and engines find it by themselves.
        host.start()
        all_of_them = [*map(loadable, PROMPTS)]
        eventually(lambda: [answer.cached for answer in again(engine, *PROMPTS, max_tokens=40)], all_of_them)
        host.has(stored(wanted))
        right(again(engine, *PROMPTS, max_tokens=40), wanted)
    host.idle()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_kvtier_hangs(start: Start, alone: Alone, llama, host: Host, load: str) -> None:
    wanted = alone(llama, *PROMPTS)
    engine = start(llama, kv_transfer_config=transfer(host, target=str(host.socket), wait=1.0, load=load))
    engine.generate(*PROMPTS)
    host.has(stored(wanted))
    engine.do("reset")
    with host.stopped():
        began = time.monotonic()
        for prompt, tokens in zip(PROMPTS, wanted, strict=True):
            right(engine.generate(prompt), [tokens])
        assert time.monotonic() - began < 30.0
    engine.do("reset")
    eventually(lambda: again(engine, C)[0].cached, loadable(C))
    host.idle()


def test_kvtier_starts_after_the_engine(start: Start, alone: Alone, llama, host: Host) -> None:
    host.kill()
    engine = start(llama, kv_transfer_config=transfer(host))
    right(engine.generate(C), alone(llama, C))
    host.start()
    eventually(lambda: again(engine, C)[0].cached, loadable(C))
    right(engine.generate(C), alone(llama, C))


@pytest.mark.parametrize("load", ["sync", "async"])
def test_blocks_on_nvme_come_up_and_bad_ones_are_misses(
    start: Start, alone: Alone, llama, host: Host, load: str
) -> None:
    wanted = alone(llama, *PROMPTS)
    engine = start(llama, kv_transfer_config=transfer(host, load=load))
    engine.generate(*PROMPTS)
    host.has(stored(wanted))

    assert host.tell("demote") == stored(wanted)
    engine.do("reset")
    answers = engine.generate(*PROMPTS)
    right(answers, wanted)
    assert [answer.cached for answer in answers] == [*map(loadable, PROMPTS)]

    # They survive the host, too.
    assert host.tell("demote") == stored(wanted)
    host.kill()
    host.start()
    assert host.blocks == stored(wanted)
    engine.do("reset")
    eventually(lambda: again(engine, C)[0].cached, loadable(C))
    engine.do("reset")
    answers = engine.generate(*PROMPTS)
    right(answers, wanted)
    assert [answer.cached for answer in answers] == [*map(loadable, PROMPTS)]

    host.tell("demote")
    assert host.tell("rot") == stored(wanted)
    assert engine.do("reset")
    apart = (A, C)
    answers = engine.generate(*apart)
    right(answers, [wanted[0], wanted[2]])
    assert [answer.cached for answer in answers] == [0, 0]
    [nvme] = [tier for tier in host.tell("status")["tiers"] if tier["tier"] == "nvme"]
    assert nvme["counters"]["corrupt"] > 0
    # What was computed instead is stored, and right; of B, what A has of it.
    host.idle()
    [answer] = again(engine, B)
    right([answer], [wanted[1]])
    assert answer.cached == 640
    host.has(stored(wanted))
    assert engine.do("reset")
    answers = engine.generate(*PROMPTS)
    right(answers, wanted)
    assert [answer.cached for answer in answers] == [*map(loadable, PROMPTS)]
    host.idle()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_wrong_bytes_are_noticed_by_tokens_and_by_verification(
    start: Start, alone: Alone, llama, host: Host, load: str
) -> None:
    """The control of all other tests: KV that is wrong and not noticed gives other tokens."""
    wanted = alone(llama, *PROMPTS)
    trusting = start(llama, kv_transfer_config=transfer(host, load=load))
    trusting.generate(*PROMPTS)
    host.has(stored(wanted))
    assert host.tell("spoil") == stored(wanted)
    trusting.do("reset")
    answers = trusting.generate(*PROMPTS)
    assert [answer.cached for answer in answers] == [*map(loadable, PROMPTS)]
    for answer, tokens in zip(answers, wanted, strict=True):
        assert answer.tokens != tokens
    trusting.close()

    for policy in POLICIES:
        careful = start(llama, kv_transfer_config=transfer(host, load=load, verify=True, policy=policy))
        right(careful.generate(*PROMPTS), wanted)
        assert failed(careful) > 0
        # What is noticed is dropped, computed and stored anew, until nothing is wrong any more.
        eventually(lambda: heals(careful, wanted), True)  # noqa: B023
        host.has(stored(wanted))
        answers = again(careful, *PROMPTS)
        right(answers, wanted)
        assert [answer.cached for answer in answers] == [*map(loadable, PROMPTS)]
        assert host.tell("spoil") == stored(wanted)
        careful.close()


def failed(engine: Engine) -> int:
    """Tokens that were promised and not loaded."""
    return sum(value for _, _, value in engine.do("series", prefix="vllm:kvtier_failed_tokens"))


def heals(engine: Engine, wanted: list[list[int]]) -> bool:
    """Whether all that is promised is loaded; answers are right in any case."""
    before = failed(engine)
    for _ in range(2):  # what a step counts is told with the next
        right(again(engine, *PROMPTS), wanted)
    return failed(engine) == before


def test_a_small_memory_stores_what_fits(start: Start, alone: Alone, llama, small: Host) -> None:
    """16 MiB hold 64 blocks of 256 KiB; what is asked for has more, and NVMe takes the rest."""
    prompts = [words(900, 101 + i) for i in range(8)]
    wanted = alone(llama, *prompts)
    engine = start(llama, kv_transfer_config=transfer(small))
    for _ in range(2):
        for prompt, tokens in zip(prompts, wanted, strict=True):
            engine.do("reset")
            right(engine.generate(prompt), [tokens])
    small.idle()

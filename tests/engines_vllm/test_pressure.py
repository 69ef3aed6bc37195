"""Many requests, little memory, requests that go away: answers stay the same, and nothing is held for long."""

from __future__ import annotations

import pytest

from tests.engines_vllm.conftest import Alone, Start
from tests.engines_vllm.engine import PAGE, transfer
from tests.engines_vllm.host import Host
from tests.engines_vllm.prompts import A, blocks, loadable, words

SHARED = (0, 40, 64, 100, 200, 512, 640, 990)
"""Tokens that each of eight prompts shares with A."""
EIGHT = [A[:n] + words(300 + 37 * i, 43 + 2 * i) for i, n in enumerate(SHARED)]


@pytest.mark.parametrize("load", ["sync", "async"])
def test_eight_at_a_time_share_prefixes_of_several_lengths(
    start: Start, alone: Alone, llama, host: Host, load: str
) -> None:
    wanted = alone(llama, *EIGHT)
    first = start(llama, kv_transfer_config=transfer(host, load=load))
    answers = first.generate(*EIGHT)
    assert [answer.tokens for answer in answers] == wanted
    stored = blocks(*(prompt + tokens[:-1] for prompt, tokens in zip(EIGHT, wanted, strict=True)))
    host.has(stored)

    second = start(llama, kv_transfer_config=transfer(host, load=load))
    answers = second.generate(*EIGHT)
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached for answer in answers] == [*map(loadable, EIGHT)]
    sources = second.sources()
    assert sources["local_compute"] == sum(len(prompt) - loadable(prompt) for prompt in EIGHT)
    assert second.external()[1] == sources["external_kv_transfer"]
    if load == "async":
        # Nothing is in vLLM's pool before it was loaded, so each request loads all of its own.
        assert sources["local_cache_hit"] == 0
    host.has(stored)
    host.idle()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_prompts_that_are_computed_in_pieces(start: Start, alone: Alone, llama, host: Host, load: str) -> None:
    engine = start(llama, max_num_batched_tokens=96, kv_transfer_config=transfer(host, load=load))
    wanted = alone(llama, *EIGHT[4:])
    for cached in ([0], [*map(loadable, EIGHT[4:])]):
        answers = engine.generate(*EIGHT[4:])
        assert [answer.tokens for answer in answers] == wanted
        if len(cached) > 1:
            assert [answer.cached for answer in answers] == cached
        host.has(blocks(*(prompt + tokens[:-1] for prompt, tokens in zip(EIGHT[4:], wanted, strict=True))))
        engine.do("reset")
    host.idle()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_preempted_requests_answer_the_same(start: Start, alone: Alone, llama, host: Host, load: str) -> None:
    """Four requests of 17 pages each at their ends, and 41 pages in all."""
    prompts = [words(400, 61 + 2 * i) for i in range(4)]
    wanted = alone(llama, *prompts, max_tokens=130)
    engine = start(llama, max_model_len=1024, num_gpu_blocks_override=41, kv_transfer_config=transfer(host, load=load))
    for round_ in range(3):
        answers = engine.generate(*prompts, max_tokens=130)
        assert [answer.tokens for answer in answers] == wanted
        assert engine.do("metrics")["vllm:num_preemptions"] > 0
        assert engine.do("reset")
        host.idle()
        # Pages that are being saved are few: not all is stored at once, but something is.
        assert 0 < host.blocks <= blocks(*(p + tokens[:-1] for p, tokens in zip(prompts, wanted, strict=True)))
        assert engine.external()[1] > 0 or not round_
    # No page is held any more: one request may have nearly all of them.
    long = words(40 * PAGE - 40, 71)[:980]
    assert [engine.generate(long)[0].tokens] == alone(llama, long)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_requests_that_are_aborted_hold_nothing(start: Start, alone: Alone, llama, host: Host, load: str) -> None:
    prompts = EIGHT[2:]
    wanted = alone(llama, *prompts)
    stored = blocks(*(prompt + tokens[:-1] for prompt, tokens in zip(prompts, wanted, strict=True)))
    engine = start(llama, kv_transfer_config=transfer(host, load=load))
    engine.generate(*prompts)
    host.has(stored)

    for steps in range(4):
        engine.do("reset")
        names = engine.do("begin", prompts=prompts)
        gone = names[steps % 2 :: 2]
        done = engine.do("step", count=steps)
        engine.do("abort", names=gone)
        done |= engine.do("finish")
        assert sorted(done) == sorted(set(names) - set(gone))
        for name, tokens in zip(names, wanted, strict=True):
            assert name in gone or done[name]["tokens"] == tokens
        host.idle()

    # All of them at once, in each state, and the pool is whole again.
    engine.do("reset")
    names = engine.do("begin", prompts=prompts)
    engine.do("step", count=2)
    engine.do("abort", names=names)
    assert engine.do("finish") == {}
    host.idle()
    assert engine.do("reset")
    answers = engine.generate(*prompts)
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached for answer in answers] == [*map(loadable, prompts)]
    host.has(stored)


def test_what_is_aborted_while_it_is_computed_is_stored_whole_or_not_at_all(
    start: Start, alone: Alone, llama, host: Host
) -> None:
    engine = start(llama, max_num_batched_tokens=128, kv_transfer_config=transfer(host))
    [name] = engine.do("begin", prompts=[A])
    engine.do("step", count=5)
    engine.do("abort", names=[name])
    # Its pages are given to others at once.
    others = [words(1000, 83 + i) for i in range(3)]
    assert [answer.tokens for answer in engine.generate(*others)] == alone(llama, *others)
    host.idle()
    engine.do("reset")
    [answer] = engine.generate(A)
    assert [answer.tokens] == alone(llama, A)
    assert answer.cached in {64 * n for n in range(11)}

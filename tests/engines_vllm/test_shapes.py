"""Engines of several processes, and models of other kinds."""

from __future__ import annotations

from pathlib import Path
from time import sleep

import pytest

from kvtier.connectors.vllm.lookup import PAUSE
from tests.engines_vllm.conftest import Alone, Make, Start
from tests.engines_vllm.engine import Engine, EngineError, again, transfer
from tests.engines_vllm.host import Host, eventually
from tests.engines_vllm.prompts import A, B, blocks, loadable, local

PROMPTS = (A, B)
SEPARATE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
RANKS = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
TRIES = 5


def test_an_engine_whose_core_is_a_process_of_its_own(start: Start, alone: Alone, llama, host: Host) -> None:
    engine = start(llama, environment=SEPARATE, kv_transfer_config=transfer(host))
    wanted = alone(llama, *PROMPTS)
    answers = [engine.generate(prompt)[0] for prompt in PROMPTS]
    assert [(answer.cached, answer.tokens) for answer in answers] == [*zip((0, local(B, A)), wanted, strict=True)]
    stored = blocks(*(prompt + tokens[:-1] for prompt, tokens in zip(PROMPTS, wanted, strict=True)))
    host.has(stored)
    engine.do("reset")
    answers = engine.generate(*PROMPTS)
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached for answer in answers] == [*map(loadable, PROMPTS)]
    host.idle()
    engine.close()
    host.has(stored)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_two_ranks_load_what_both_of_them_have(start: Start, alone: Alone, llama, host: Host, load: str) -> None:
    wanted = alone(llama, *PROMPTS, **RANKS)
    engine = start(llama, kv_transfer_config=transfer(host, load=load), async_scheduling=load == "async", **RANKS)
    answers = [engine.generate(prompt)[0] for prompt in PROMPTS]
    assert [answer.tokens for answer in answers] == wanted
    stored = blocks(*(prompt + tokens[:-1] for prompt, tokens in zip(PROMPTS, wanted, strict=True)))
    host.has(2 * stored)

    everything, nothing = [*map(loadable, PROMPTS)], [0, local(B, A)]
    for cached in (everything, nothing, everything):
        if cached == nothing:
            assert host.tell("forget") == stored
        # Two ranks that wait for each other leave a small machine no time: what was late then, a lookup or a load, is
        # counted, and the only reason for other numbers.
        for _ in range(TRIES):
            engine.do("reset")
            late = missed(engine)
            answers = engine.generate(*PROMPTS)
            assert [answer.tokens for answer in answers] == wanted
            host.has(2 * stored)
            if missed(engine) == late or cached == nothing:
                break
            sleep(PAUSE)
        assert [answer.cached for answer in answers] == cached
    host.idle()


def missed(engine: Engine) -> float:
    """Requests that could not be looked up, and tokens that could not be loaded."""
    late = [engine.do("series", prefix=f"vllm:kvtier_{what}") for what in ("missed", "failed_tokens")]
    return sum(value for series in late for _, _, value in series)


WINDOWS = {"tie_word_embeddings": True, "layer_types": ["sliding_attention", "full_attention"] * 2}


def gemma(made: Make, window: int) -> Path:
    return made(f"gemma-{window}", "Gemma2", sliding_window=window, **WINDOWS)


def test_layers_with_a_window_are_loaded_as_far_as_the_window_wants(
    start: Start, alone: Alone, made: Make, host: Host
) -> None:
    """vLLM frees their pages when the window has passed, or keeps them, as it is told; both share one cache."""
    model = gemma(made, 128)
    wanted = alone(model, *PROMPTS)
    stored = blocks(*(prompt + tokens[:-1] for prompt, tokens in zip(PROMPTS, wanted, strict=True)))
    for turn, keeps in enumerate((False, False, True)):
        options = {"disable_hybrid_kv_cache_manager": True} if keeps else {}
        engine = start(model, kv_transfer_config=transfer(host), **options)
        if not turn:
            assert [engine.generate(prompt)[0].tokens for prompt in PROMPTS] == wanted
            host.has(stored)
            engine.do("reset")
        for prompt, tokens in zip(PROMPTS, wanted, strict=True):
            [answer] = engine.generate(prompt)
            assert (answer.cached, answer.tokens) == (loadable(prompt), tokens)
            engine.do("reset")
        assert engine.external()[1] >= sum(map(loadable, PROMPTS))
        engine.close()
    host.has(stored)
    host.idle()


def test_layers_with_a_window_whose_load_fails_are_computed(start: Start, alone: Alone, made: Make, host: Host) -> None:
    """vLLM computes the whole request, and not single pages."""
    model = gemma(made, 128)
    wanted = alone(model, *PROMPTS)
    engine = start(model, kv_transfer_config=transfer(host, verify=True))
    assert [answer.tokens for answer in engine.generate(*PROMPTS)] == wanted
    stored = blocks(*(prompt + tokens[:-1] for prompt, tokens in zip(PROMPTS, wanted, strict=True)))
    host.has(stored)
    host.tell("spoil")
    engine.do("reset")
    answers = engine.generate(*PROMPTS)
    assert [(answer.finish, answer.tokens) for answer in answers] == [("length", tokens) for tokens in wanted]
    host.has(stored)

    for steps in range(3):
        engine.do("reset")
        names = engine.do("begin", prompts=PROMPTS)
        done = engine.do("step", count=steps)
        host.kill()
        done |= engine.do("finish")
        assert [done[name]["tokens"] for name in names] == wanted
        host.start()
        eventually(lambda: again(engine, A)[0].cached, loadable(A))


def test_what_cannot_be_kept_by_prefix_is_refused_at_the_start(start: Start, made: Make, host: Host) -> None:
    cases = [
        (gemma(made, 32), {}, "window of 32 tokens.*block_tokens"),
        (gemma(made, 128), {"load": "sync"}, "sync.*sliding windows"),
    ]
    for model, extra, said in cases:
        with pytest.raises(EngineError, match=said):
            start(model, kv_transfer_config=transfer(host, **extra))

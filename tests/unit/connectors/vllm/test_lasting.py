"""What goes wrong for good, or lasts, costs a request no more than what kvtier would have saved it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import kvtier
from kvtier.connectors.vllm.held import SOON
from kvtier.connectors.vllm.messages import Outcome
from tests.unit.connectors.vllm.engine import BLOCK, output
from tests.unit.connectors.vllm.side import PAGES, PROMPT, Engine, Here, leases, store


def test_what_could_not_be_loaded_is_not_promised_again(engine: Engine, cache: kvtier.Cache) -> None:
    """A worker that can load nothing, over a host that has it all: vLLM asks again after each failure."""
    store(cache, PROMPT[: 3 * BLOCK])
    request = engine.arrive()
    engine.admit(request)
    engine.side.step(output())
    engine.side.done(Outcome(loaded={"a": (1, 0)}))
    request.num_computed_tokens = 0
    assert engine.side.matched(request, 0) == (0, False)
    assert leases(cache) == 0
    # Others are: what failed may have been this request's affair.
    assert engine.admit(engine.arrive("b")) == 3 * BLOCK


def test_a_save_that_hangs_keeps_no_request_from_being_scheduled(engine: Engine) -> None:
    """vLLM does not preempt while a save may give pages back: that must be true, and soon."""
    request = engine.arrive()
    engine.admit(request)
    engine.pool.touch(engine.pool.blocks[page] for page in PAGES)
    [save] = engine.side.step(output(a=2 * BLOCK)).saves
    assert engine.side.pending
    assert not engine.side.soon_free  # the request has the pages as well
    engine.pool.free_blocks(engine.pool.blocks[page] for page in PAGES)
    assert engine.side.soon_free
    engine.now += SOON + 0.01
    assert not engine.side.soon_free
    assert engine.side.pending
    engine.side.done(Outcome(saved={save.number: (1, 2)}))
    assert not engine.side.pending


def test_the_engines_speed_is_that_of_the_steps_that_compute(engine: Engine, here: Here) -> None:
    """vLLM reports nothing of a step that neither computes nor brings news, as while a load is under way."""
    for _ in range(100):
        engine.side.step(output())
        engine.now += 0.001
    for tokens, seconds in ((512, 2.0), (8, 0.5), (1024, 4.0)):
        step = engine.side.step(output(a=tokens))
        engine.now += seconds
        engine.side.done(Outcome(step=step.number))
        engine.side.step(output())
        engine.side.done(None)
    assert here.speeds == [(512, pytest.approx(2.0)), (1024, pytest.approx(4.0))]


def test_the_engines_own_cache_can_be_reset_while_blocks_are_saved(engine: Engine) -> None:
    """vLLM cannot while anybody holds a page, and fails when it was told to preempt what runs."""
    request = engine.arrive()
    engine.admit(request)
    [save] = engine.side.step(output(a=2 * BLOCK)).saves
    request.num_computed_tokens = 3 * BLOCK
    engine.side.ended(request, (PAGES,))  # one block more, of which no worker knows yet
    assert len(engine.pool.held) == 12
    engine.beside = SimpleNamespace(settle=lambda seconds: Outcome(saved={save.number: (1, 2)}))
    assert engine.manager.reset_prefix_cache()
    assert engine.side.step(output()).saves == ()
    assert not engine.side.pending


def test_what_could_not_be_loaded_within_a_step_is_in_no_cache(here: Here, cache: kvtier.Cache) -> None:
    """vLLM caches such pages before they are loaded, and keeps them when they were not, or their request is gone."""
    engine = Engine(here, load="sync")
    store(cache, PROMPT[: 3 * BLOCK])
    assert engine.admit(engine.arrive("a")) == 3 * BLOCK
    other = engine.arrive("b")  # has two blocks of them in common, by vLLM's own cache
    engine.manager.pages["b"] = ([*PAGES[:8], *range(100, 114)],)
    engine.side.matched(other, 2 * BLOCK)
    engine.side.allocated(other, SimpleNamespace(get_block_ids=lambda: engine.manager.pages["b"]), 0)
    [load] = engine.side.step(output(a=BLOCK, b=BLOCK)).loads
    assert load.layerwise
    engine.side.done(Outcome(loaded={"a": (1, BLOCK)}))
    assert set(PAGES[4:]).isdisjoint(engine.pool.cached)
    assert set(range(100, 114)).isdisjoint(engine.pool.cached)
    assert set(PAGES[:4]) <= engine.pool.cached
    # Which of both computes it anew is vLLM's affair, and in which order: neither is stored.
    other.num_computed_tokens = 3 * BLOCK
    assert engine.side.step(output(b=2 * BLOCK)).saves == ()
    engine.side.close()

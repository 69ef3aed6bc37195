"""What goes wrong for good, or lasts, costs a request no more than what kvtier would have saved it."""

from __future__ import annotations

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

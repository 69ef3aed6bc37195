"""What goes wrong for good, or lasts, costs a request no more than what kvtier would have saved it."""

from __future__ import annotations

import kvtier
from kvtier.connectors.vllm.messages import Outcome
from tests.unit.connectors.vllm.engine import BLOCK, output
from tests.unit.connectors.vllm.side import PROMPT, Engine, leases, store


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

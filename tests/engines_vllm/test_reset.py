"""What vLLM keeps itself can be forgotten at any time, also while blocks are being saved."""

from __future__ import annotations

import pytest

from tests.engines_vllm.conftest import Alone, Start
from tests.engines_vllm.engine import transfer
from tests.engines_vllm.host import Host
from tests.engines_vllm.prompts import A, B, C, words

PROMPTS = (A, B, C)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_reset_right_behind_an_answer_succeeds(start: Start, alone: Alone, llama, host: Host, load: str) -> None:
    wanted = alone(llama, *PROMPTS)
    engine = start(llama, kv_transfer_config=transfer(host, load=load))
    for _ in range(3):
        for prompt, tokens in zip(PROMPTS, wanted, strict=True):
            assert [answer.tokens for answer in engine.generate(prompt)] == [tokens]
            assert engine.do("renew")


def test_what_runs_is_computed_anew_after_a_reset(start: Start, alone: Alone, llama, host: Host) -> None:
    prompts = [words(500, 31 + 2 * i) for i in range(4)]
    wanted = alone(llama, *prompts)
    engine = start(llama, kv_transfer_config=transfer(host, load="sync"))
    names, done = engine.do("begin", prompts=prompts), {}
    for steps in (1, 1, 2, 3, 8):
        done |= engine.do("step", count=steps)
        assert engine.do("renew", running=True)
    done |= engine.do("finish")
    assert [done[name]["tokens"] for name in names] == wanted
    assert engine.do("renew")
    host.idle()


def test_a_host_that_hangs_delays_a_reset_and_no_more(start: Start, alone: Alone, llama, host: Host) -> None:
    engine = start(llama, kv_transfer_config=transfer(host, target=str(host.socket)))
    wanted = alone(llama, C)
    with host.stopped():
        assert [engine.generate(C)[0].tokens] == wanted
        assert engine.do("renew")
    host.idle()

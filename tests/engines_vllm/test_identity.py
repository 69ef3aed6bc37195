"""KV that is not the same is never shared; what an engine may do with it is the configuration's to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines_vllm import models
from tests.engines_vllm.conftest import Alone, Start
from tests.engines_vllm.engine import EngineError, transfer
from tests.engines_vllm.host import Host
from tests.engines_vllm.prompts import A, C, blocks, loadable, local


def test_other_weights_and_other_precisions_share_nothing(
    start: Start, made, llama, host: Host, tmp_path: Path
) -> None:
    engine = start(llama, kv_transfer_config=transfer(host))
    [answer] = engine.generate(A)
    each = blocks(A + answer.tokens[:-1])
    host.has(each)
    engine.close()

    # As if somebody had trained on, and saved it under the same name.
    other = models.make(tmp_path / llama.name, seed=1)
    for count, (model, options) in enumerate([(other, {}), (llama, {"dtype": "bfloat16"})], 2):
        engine = start(model, kv_transfer_config=transfer(host), **options)
        [answer] = engine.generate(A)
        assert answer.cached == 0
        host.has(count * each)
        engine.close()


def test_a_copy_of_the_same_weights_shares_all(start: Start, alone: Alone, llama, host: Host, tmp_path: Path) -> None:
    import shutil

    engine = start(llama, kv_transfer_config=transfer(host))
    [answer] = engine.generate(A)
    host.has(blocks(A + answer.tokens[:-1]))
    copy = shutil.copytree(llama, tmp_path / "elsewhere" / llama.name)
    [answer] = start(copy, kv_transfer_config=transfer(host)).generate(A)
    assert (answer.cached, [answer.tokens]) == (loadable(A), alone(llama, A))


def test_salts_and_adapters_are_kept_apart(start: Start, alone: Alone, llama, host: Host, tmp_path: Path) -> None:
    adapters = {name: str(models.make_adapter(tmp_path / name, seed)) for seed, name in enumerate(("one", "two"), 7)}
    options = {"enable_lora": True, "max_lora_rank": 8, "adapters": adapters, "kv_transfer_config": transfer(host)}
    engine = start(llama, **options)
    before, told = 0, {}
    cases = [
        {},
        {"salts": ["x"]},
        {"salts": ["y"]},
        {"adapter": "one"},
        {"adapter": "two"},
        {"salts": ["x"], "adapter": "one"},
    ]
    for case in cases:
        engine.do("reset")
        [answer] = engine.generate(A, **case)
        assert answer.cached == 0, case
        before += blocks(A + answer.tokens[:-1])
        host.has(before)
        told[str(case)] = answer.tokens
    assert [told[str({})]] == alone(llama, A)
    assert told[str({"salts": ["x"]})] == told[str({"salts": ["y"]})] == told[str({})]
    assert len({tuple(told[str(case)]) for case in cases}) == 3
    engine.close()

    # Another process loads each, and answers as the first one did.
    engine = start(llama, **options)
    for case in cases:
        engine.do("reset")
        [answer] = engine.generate(A, **case)
        assert (answer.cached, answer.tokens) == (loadable(A), told[str(case)]), case
    host.has(before)


def test_roles(start: Start, alone: Alone, llama, host: Host) -> None:
    """Who only stores, who only loads, and who is told to store nothing."""
    producer = start(llama, kv_transfer_config=transfer(host, role="kv_producer"))
    for _ in range(2):
        [answer] = producer.generate(A)
        assert (answer.cached, [answer.tokens]) == (0, alone(llama, A))
        host.has(blocks(A + answer.tokens[:-1]))
        producer.do("reset")
    producer.close()
    there = host.blocks
    for options in ({"role": "kv_consumer"}, {"save": False}):
        consumer = start(llama, kv_transfer_config=transfer(host, **options))
        for prompt, cached in ((A, loadable(A)), (C, 0)):
            [answer] = consumer.generate(prompt)
            assert (answer.cached, [answer.tokens]) == (cached, alone(llama, prompt))
        consumer.do("reset")
        [answer] = consumer.generate(C)
        assert answer.cached == local(C) == 0
        consumer.close()
        assert host.blocks == there
    host.idle()


def test_a_setting_that_is_none_is_refused_at_the_start(start: Start, llama, host: Host) -> None:
    with pytest.raises(EngineError, match=r"block_token.*block_tokens"):
        start(llama, kv_transfer_config=transfer(host, block_token=64))

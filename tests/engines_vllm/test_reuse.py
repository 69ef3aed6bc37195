"""What one engine computed is loaded by every other, and no token of any answer changes."""

from __future__ import annotations

import pytest

from tests.engines_vllm.conftest import Alone, Start
from tests.engines_vllm.engine import Answer, Engine, transfer
from tests.engines_vllm.host import Host
from tests.engines_vllm.prompts import A, B, C, blocks, loadable, local, whole, words

PROMPTS = (A, B, C)
TOKENS = sum(map(len, PROMPTS))
LOADABLE = sum(map(loadable, PROMPTS))


def computed(prompt: list[int], answer: Answer) -> list[int]:
    """Tokens whose KV an engine has at the end: the last one was never put in."""
    return prompt + answer.tokens[:-1]


def one_by_one(engine: Engine, *prompts: list[int], reset: bool = False) -> list[Answer]:
    answers = []
    for prompt in prompts:
        if reset:
            assert engine.do("reset")
        answers += engine.generate(prompt)
    return answers


@pytest.mark.parametrize(
    ("dtype", "load"), [("float32", "sync"), ("float32", "async"), ("bfloat16", "sync"), ("bfloat16", "async")]
)
def test_a_second_process_loads_what_the_first_computed(
    start: Start, alone: Alone, llama, host: Host, dtype: str, load: str
) -> None:
    options = {"dtype": dtype, "kv_transfer_config": transfer(host, load=load)}
    wanted = alone(llama, *PROMPTS, dtype=dtype)

    first = start(llama, **options)
    answers = one_by_one(first, *PROMPTS)
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached for answer in answers] == [0, local(B, A), 0]
    assert first.external() == (TOKENS - local(B, A), 0)
    stored = blocks(*(computed(prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True)))
    host.has(stored)

    answers = one_by_one(first, *PROMPTS, reset=True)
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached for answer in answers] == [*map(loadable, PROMPTS)]
    assert first.external() == (2 * TOKENS - local(B, A), LOADABLE)

    second = start(llama, **options)
    answers = one_by_one(second, *PROMPTS)
    assert [answer.tokens for answer in answers] == wanted
    assert [answer.cached for answer in answers] == [*map(loadable, PROMPTS)]
    assert second.external() == (TOKENS - local(B, A), LOADABLE - local(B, A))
    assert second.sources() == {
        "local_compute": TOKENS - LOADABLE,
        "local_cache_hit": local(B, A),
        "external_kv_transfer": LOADABLE - local(B, A),
    }
    assert second.do("modules", names=["ray", "kvtier", "kvtier_services"]) == ["kvtier"]
    host.has(stored)
    host.idle()


def test_two_engines_at_the_same_time_share_one_cache(start: Start, alone: Alone, llama, host: Host) -> None:
    engines = [start(llama, ready=False, kv_transfer_config=transfer(host)) for _ in range(2)]
    both = words(900, 17)
    own = [[both[:450] + words(500, 19 + i), words(700, 23 + i)] for i in range(2)]
    everything = [both, *own[0], *own[1]]
    wanted = dict(zip(map(tuple, everything), alone(llama, *everything), strict=True))

    def right(prompts: list[list[int]], answers: list[Answer]) -> None:
        assert [answer.tokens for answer in answers] == [wanted[tuple(prompt)] for prompt in prompts]

    for engine in engines:
        engine.ready()
    # Both compute the same blocks at the same time; who comes second stores nothing, or loads them.
    for engine, mine in zip(engines, own, strict=True):
        engine.send("generate", prompts=[both, *mine])
    for engine, mine in zip(engines, own, strict=True):
        right([both, *mine], engine.answers())
    host.has(blocks(*(prompt + list(tokens[:-1]) for prompt, tokens in zip(everything, wanted.values(), strict=True))))

    # Each is asked at the same time for what the other one computed.
    for engine in engines:
        engine.do("reset")
    for engine, theirs in zip(engines, reversed(own), strict=True):
        engine.send("generate", prompts=[theirs[1], both])
    for engine, theirs in zip(engines, reversed(own), strict=True):
        answers = engine.answers()
        right([theirs[1], both], answers)
        assert [answer.cached for answer in answers] == [loadable(theirs[1]), loadable(both)]
    host.idle()


def test_a_conversation_goes_on_in_another_process(start: Start, alone: Alone, llama, host: Host) -> None:
    first = start(llama, kv_transfer_config=transfer(host))
    question = words(200, 29)
    [answer] = first.generate(question, max_tokens=200)
    said = computed(question, answer)
    host.has(blocks(said))
    first.close()

    second = start(llama, kv_transfer_config=transfer(host))
    further = question + answer.tokens + words(40, 31)
    [answer] = second.generate(further)
    assert answer.cached == whole(len(said)) == 384
    assert [answer.tokens] == alone(llama, further)


def test_a_prompt_that_leaves_another_within_a_block_is_loaded_from_there(
    start: Start, alone: Alone, llama, host: Host
) -> None:
    """vLLM finds whole pages by itself, and two pages are a block."""
    first = start(llama, kv_transfer_config=transfer(host))
    short, long = words(110, 37), words(500, 37)
    assert short == long[:110]
    answers = first.generate(long)
    host.has(blocks(computed(long, answers[0])))

    second = start(llama, kv_transfer_config=transfer(host, load="sync"))
    third = start(llama, kv_transfer_config=transfer(host, load="async"))
    for engine in (second, third):
        engine.generate(short[:97])
        assert engine.external() == (97, 64)
        [answer] = engine.generate(long)
        assert (answer.cached, [answer.tokens]) == (448, alone(llama, long))
        assert engine.external() == (97 + 500 - 96, 64 + 448 - 96)


def test_blocks_are_as_long_as_asked(start: Start, alone: Alone, llama, host: Host) -> None:
    prompt = words(250, 41)
    for tokens, made in ((32, 32), (100, 96)):
        engine = start(llama, kv_transfer_config=transfer(host, block_tokens=tokens))
        before = host.blocks
        [answer] = engine.generate(prompt)
        host.has(before + blocks(computed(prompt, answer), block=made))
        engine.do("reset")
        [answer] = engine.generate(prompt)
        assert (answer.cached, [answer.tokens]) == (loadable(prompt, made), alone(llama, prompt))
        engine.close()


def test_a_process_that_ends_leaves_what_it_computed(start: Start, alone: Alone, llama, host: Host) -> None:
    """Saves are in the background; an engine that is told to end finishes them."""
    first = start(llama, kv_transfer_config=transfer(host))
    [answer] = first.generate(A)
    first.close()
    assert host.tell("status")["blocks"] == blocks(computed(A, answer))

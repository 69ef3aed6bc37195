"""The scheduler's side promises what is leased, never waits for the host, and holds pages until they are saved."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

import kvtier
from kvtier.connectors.vllm.asking import AHEAD, KEPT
from kvtier.connectors.vllm.lookup import PAUSE
from kvtier.connectors.vllm.messages import Outcome
from kvtier.errors import DeadlineExceeded, SessionUnavailable
from tests.unit.connectors.vllm.engine import BLOCK, PAGE, output
from tests.unit.connectors.vllm.side import PAGES, PATIENCE, PROMPT, RECIPE, Engine, Here, leases, store


def test_what_is_stored_is_promised_and_leased_until_it_is_loaded(engine: Engine, cache: kvtier.Cache) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    request = engine.arrive()
    assert engine.side.matched(request, 0) == (3 * BLOCK, True)
    assert engine.admit(request) == 3 * BLOCK
    [load] = engine.side.step(output()).loads
    assert (load.request, load.blocks.start, load.blocks.origin, len(load.blocks.keys)) == ("a", 0, 0, 3)
    assert load.blocks.pages == (tuple(PAGES[:12]),)
    assert engine.side.step(output()).loads == ()
    assert leases(cache) == 1
    engine.side.done(Outcome(loaded={"a": (1, 3 * BLOCK)}))
    assert leases(cache) == 0


def test_what_the_engine_has_itself_is_not_loaded(engine: Engine, cache: kvtier.Cache) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    request = engine.arrive()
    assert engine.admit(request, local=80) == 112
    [load] = engine.side.step(output()).loads
    # From the page that the engine lacks; its block begins a page earlier.
    assert (load.blocks.start, load.blocks.origin, load.blocks.pages) == (80, 64, (tuple(PAGES[4:12]),))


@pytest.mark.parametrize("local", [3 * BLOCK, 3 * BLOCK + PAGE, 5 * BLOCK])
def test_who_has_it_all_loads_nothing_and_leases_nothing(engine: Engine, cache: kvtier.Cache, local: int) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    request = engine.arrive()
    assert engine.side.matched(request, local) == (0, False)
    assert engine.admit(request, local) == 0
    assert leases(cache) == 0
    assert engine.side.step(output()).loads == ()


def test_the_last_token_is_always_computed(engine: Engine, cache: kvtier.Cache) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    assert engine.admit(engine.arrive(tokens=PROMPT[: 3 * BLOCK])) == 2 * BLOCK


def test_a_host_that_hangs_is_asked_again_and_then_a_miss(engine: Engine, here: Here, cache: kvtier.Cache) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    here.free.clear()
    request = engine.arrive(answered=False)
    for _ in range(3):
        assert engine.side.matched(request, 0) == (None, False)
        engine.side.step(output())
    engine.now += PATIENCE + 0.1
    assert engine.side.matched(request, 0) == (0, False)
    assert engine.side.drain() == {"missed:late": 1}
    here.free.set()
    engine.side.close()
    assert leases(cache) == 0  # what the lookup found after all was given back


def test_a_host_that_is_not_there_is_a_miss_and_what_was_computed_is_saved_when_it_is(
    engine: Engine, here: Here, cache: kvtier.Cache
) -> None:
    here.cache = None
    request = engine.arrive()
    assert engine.admit(request) == 0
    assert engine.side.step(output(a=2 * BLOCK)).saves == ()
    request.num_computed_tokens = 2 * BLOCK
    here.cache = cache
    [save] = engine.side.step(output(a=BLOCK)).saves
    assert (save.blocks.start, len(save.blocks.keys)) == (0, 3)
    assert engine.side.drain() == {"missed:unavailable": 1}


def test_weights_without_a_name_yet_are_a_miss(here: Here) -> None:
    engine = Engine(here, known=False)
    request = engine.arrive()
    assert engine.admit(request) == 0
    assert engine.side.step(output(a=2 * BLOCK)).saves == ()
    engine.revision.set_result("r")
    [save] = engine.side.step(output(a=2 * BLOCK)).saves
    assert len(save.blocks.keys) == 2
    engine.side.close()


def test_a_request_that_waits_long_keeps_no_lease(engine: Engine, cache: kvtier.Cache) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    request = engine.arrive()
    assert engine.side.matched(request, 0) == (3 * BLOCK, True)
    store(cache, PROMPT[: 4 * BLOCK])
    engine.now += KEPT + 0.1
    if engine.side.matched(request, 0)[0] is None:
        engine.answered()
    assert engine.side.matched(request, 0) == (4 * BLOCK, True)
    assert leases(cache) == 1
    engine.side.ended(request, ([],))
    assert leases(cache) == 0


def test_a_request_that_is_not_asked_about_keeps_no_lease_either(engine: Engine, cache: kvtier.Cache) -> None:
    """It waits until others have ended, and its lookup began when it arrived."""
    store(cache, PROMPT[: 3 * BLOCK])
    request = engine.arrive()
    engine.side.step(output())
    assert leases(cache) == 1
    engine.now += KEPT + 0.1
    engine.side.step(output())
    assert leases(cache) == 0
    if engine.side.matched(request, 0)[0] is None:
        engine.answered()
    assert engine.side.matched(request, 0) == (3 * BLOCK, True)


def test_of_a_long_queue_those_are_looked_up_that_the_engine_asks_about_first(
    engine: Engine, cache: kvtier.Cache
) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    queue = [engine.arrive(f"r{i}", answered=False) for i in range(AHEAD + 20)]
    for _ in range(2):
        answers = [engine.side.matched(request, 0) for request in queue]
        for request in queue[:AHEAD]:
            engine.answered(request.request_id)
        engine.side.step(output())
    assert answers == [(3 * BLOCK, True)] * AHEAD + [(None, False)] * 20
    assert leases(cache) == AHEAD
    # Who comes to the front has one of the last ones' places.
    first = engine.arrive("first", answered=False)
    assert engine.side.matched(first, 0)[0] in (None, 3 * BLOCK)
    engine.answered("first")
    assert engine.side.matched(first, 0) == (3 * BLOCK, True)
    assert leases(cache) == AHEAD
    for request in (*queue, first):
        engine.side.ended(request, ([],))
    assert leases(cache) == 0


def test_a_request_that_ends_while_it_is_loaded_keeps_its_lease_until_that_is_over(
    engine: Engine, cache: kvtier.Cache
) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    request = engine.arrive()
    engine.admit(request)
    engine.side.step(output())
    engine.side.ended(request, (PAGES,))
    assert engine.side.step(output()).saves == ()
    assert leases(cache) == 1
    engine.side.done(Outcome(loaded={"a": (1, 3 * BLOCK)}))
    assert leases(cache) == 0


def test_blocks_are_saved_when_they_are_whole_and_their_pages_held_until_then(engine: Engine) -> None:
    request = engine.arrive()
    engine.admit(request)
    [save] = engine.side.step(output(a=150)).saves
    assert (save.blocks.start, len(save.blocks.keys), save.blocks.pages) == (0, 2, (tuple(PAGES[:8]),))
    request.num_computed_tokens = 150
    assert engine.side.step(output(a=1)).saves == ()
    assert engine.pool.held == PAGES[:8]
    assert engine.side.pending
    engine.side.ended(request, (PAGES,))
    engine.side.done(Outcome(saved={save.number: (1, 2)}))
    assert engine.pool.held == []
    assert not engine.side.pending


def test_tokens_that_are_guessed_are_not_saved(engine: Engine) -> None:
    """Of a step that also computes what a draft proposes, or runs ahead of its tokens."""
    request = engine.arrive(tokens=PROMPT[: 2 * BLOCK - 3])
    engine.admit(request)
    [save] = engine.side.step(output(a=2 * BLOCK - 3)).saves
    request.num_computed_tokens = 2 * BLOCK - 3
    assert engine.side.step(output(a=5)).saves == ()
    request.all_token_ids += [7, 8, 9]
    [save] = engine.side.step(output(a=5)).saves
    assert (save.blocks.start, len(save.blocks.keys)) == (BLOCK, 2)


def test_what_became_known_with_the_last_step_is_saved_at_the_end(engine: Engine) -> None:
    request = engine.arrive(tokens=PROMPT[: 2 * BLOCK - 1])
    engine.admit(request)
    engine.side.step(output(a=2 * BLOCK - 1))
    request.num_computed_tokens = 2 * BLOCK
    request.all_token_ids += [7, 8]
    engine.side.ended(request, (PAGES,))
    [save] = engine.side.step(output()).saves
    assert (save.blocks.start, len(save.blocks.keys)) == (BLOCK, 2)
    assert set(PAGES[4:8]) <= set(engine.pool.held)


@pytest.mark.parametrize(("name", "saves"), [("FINISHED_ABORTED", 1), ("FINISHED_ERROR", 0)])
def test_of_what_failed_nothing_is_saved(engine: Engine, name: str, saves: int) -> None:
    request = engine.arrive()
    engine.admit(request)
    engine.side.step(output(a=BLOCK - 1))
    request.num_computed_tokens = BLOCK
    request.status = SimpleNamespace(name=name)
    engine.side.ended(request, (PAGES,))
    assert len(engine.side.step(output()).saves) == saves


def test_what_was_refused_is_saved_with_the_next_block(engine: Engine) -> None:
    request = engine.arrive()
    engine.admit(request)
    [save] = engine.side.step(output(a=3 * BLOCK)).saves
    engine.side.done(Outcome(saved={save.number: (1, 1)}))
    request.num_computed_tokens = 3 * BLOCK
    [again] = engine.side.step(output(a=BLOCK)).saves
    assert (again.blocks.start, len(again.blocks.keys)) == (BLOCK, 4)


def test_what_could_not_be_loaded_is_saved_again(engine: Engine, cache: kvtier.Cache) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    request = engine.arrive()
    engine.admit(request)
    engine.side.step(output())
    engine.side.done(Outcome(loaded={"a": (1, BLOCK)}))
    request.num_computed_tokens = BLOCK
    [save] = engine.side.step(output(a=3 * BLOCK)).saves
    assert (save.blocks.start, len(save.blocks.keys)) == (BLOCK, 4)
    assert engine.side.drain()["failed_tokens"] == 2 * BLOCK


def test_no_more_than_a_part_of_the_engines_pages_is_held_and_the_rest_is_saved_later(here: Here) -> None:
    engine = Engine(here, pages=36)
    request = engine.arrive()
    engine.admit(request)
    # Of 36 pages 9 may be held; a block has 4 of them.
    [save] = engine.side.step(output(a=5 * BLOCK)).saves
    assert (save.blocks.start, len(save.blocks.keys)) == (0, 2)
    request.num_computed_tokens = 5 * BLOCK
    for _ in range(3):
        assert engine.side.step(output(a=1)).saves == ()
        assert len(engine.pool.held) == 8
    engine.side.done(Outcome(saved={save.number: (1, 2)}))
    [save] = engine.side.step(output(a=1)).saves
    assert (save.blocks.start, len(save.blocks.keys)) == (2 * BLOCK, 4)
    # Each block once, however often it was refused.
    assert engine.side.drain()["refused:engine_pressure"] == 3
    engine.side.close()


def test_a_hit_is_what_all_ranks_have_and_a_page_is_free_when_all_have_saved_it(
    here: Here, cache: kvtier.Cache
) -> None:
    engine = Engine(here, ranks=2)
    store(cache, PROMPT[: 4 * BLOCK], rank=0, ranks=2)
    store(cache, PROMPT[: 2 * BLOCK], rank=1, ranks=2)
    request = engine.arrive()
    assert engine.admit(request) == 2 * BLOCK
    engine.side.step(output())
    engine.side.done(Outcome(loaded={"a": (1, 2 * BLOCK)}))
    assert leases(cache) == 2
    engine.side.done(Outcome(loaded={"a": (1, 2 * BLOCK)}))
    assert leases(cache) == 0
    [save] = engine.side.step(output(a=2 * BLOCK)).saves
    engine.side.done(Outcome(saved={save.number: (1, 2)}))
    assert engine.pool.held == PAGES[8:16]
    engine.side.done(Outcome(saved={save.number: (1, 1)}))
    assert engine.pool.held == []
    request.num_computed_tokens = 4 * BLOCK
    [again] = engine.side.step(output(a=BLOCK)).saves
    assert again.blocks.start == 3 * BLOCK
    engine.side.close()


def test_after_a_reset_nothing_older_is_used_and_nothing_of_it_saved(engine: Engine, cache: kvtier.Cache) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    before = engine.arrive("before")
    engine.admit(before)
    engine.side.step(output())
    engine.side.done(Outcome(loaded={"before": (1, 3 * BLOCK)}))
    engine.side.reset()
    assert engine.side.step(output(before=2 * BLOCK)).saves == ()
    after = engine.arrive("after")
    assert engine.admit(after) == 0
    [save] = engine.side.step(output(after=BLOCK)).saves
    assert save.blocks.recipe != RECIPE.but(revision="r")


def test_pages_that_a_window_has_passed_are_not_saved(engine: Engine) -> None:
    request = engine.arrive()
    engine.admit(request)
    engine.manager.pages["a"] = ([0, 0, *PAGES[2:]],)
    assert engine.side.step(output(a=2 * BLOCK)).saves == ()
    assert engine.pool.held == []


def test_what_another_connector_is_loading_is_not_saved_when_its_request_is_aborted(engine: Engine) -> None:
    """vLLM counts the tokens as computed from when it waits for them; see its MultiConnector."""
    request = engine.arrive()
    engine.admit(request)
    request.num_computed_tokens = 3 * BLOCK
    engine.side.ended(request, (PAGES,))
    assert engine.side.step(output()).saves == ()
    assert engine.pool.held == []


@pytest.mark.parametrize(
    ("problem", "counted", "after"),
    [
        (SessionUnavailable("gone"), "unavailable", "unavailable"),
        (DeadlineExceeded("hung"), "DeadlineExceeded", "paused"),
    ],
)
def test_a_host_that_no_longer_answers_is_counted_and_said_and_one_that_hangs_left_alone(
    engine: Engine,
    here: Here,
    cache: kvtier.Cache,
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
    counted: str,
    after: str,
) -> None:
    store(cache, PROMPT[: 3 * BLOCK])
    asked = []

    def fail(*given: object, **options: object) -> None:
        asked.append(given)
        raise problem

    monkeypatch.setattr(cache.session, "match", fail)
    assert engine.admit(engine.arrive("a")) == 0
    assert engine.admit(engine.arrive("b")) == 0
    assert engine.side.drain() == Counter([f"missed:{counted}", f"missed:{after}"])
    assert here.said[0].startswith("the host does not answer")
    assert len(asked) == (1 if after == "paused" else 2)
    monkeypatch.undo()
    engine.now += PAUSE + 0.1
    assert engine.admit(engine.arrive("c")) == 3 * BLOCK

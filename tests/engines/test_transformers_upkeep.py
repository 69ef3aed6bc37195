"""Conversations go on when memory is short, and when kvtier dies in the middle of one."""

from __future__ import annotations

import gc
import signal
import time
from contextlib import contextmanager

import psutil
import pytest
import torch

import kvtier
from tests.door_fixture import Child, folders

pytest.importorskip("transformers")

from kvtier.connectors.transformers import KVTierCache
from tests.transformers_fixture import BLOCK, make, plain, space_of, stored, words

ANSWER = BLOCK + 4
TURNS = 4


def answer(model, chat, ids):
    return model.generate(**chat.turn(ids), max_new_tokens=ANSWER, do_sample=False)[0]


def go_on(model, chat, ids, number):
    """One turn, compared with the model alone; the next turn's prompt."""
    whole = answer(model, chat, ids)
    assert whole[len(ids) :].tolist() == plain(model, ids[None], ANSWER)[0]
    return torch.cat([whole, words(number, 20)])


def test_many_conversations_over_little_memory(tmp_path):
    """12 conversations that end with 11 to 13 blocks of 12 KiB: twice what the CPU tier holds."""
    model = make()
    tiers = {"cpu": {"capacity": "1MiB"}, "nvme": {"path": str(tmp_path), "capacity": "4MiB"}}
    process, resident = psutil.Process(), []
    with kvtier.open(tiers) as cache:
        space = space_of(cache, model)
        # Of a model as small as this one everything is computed faster than it is read.
        space.computed = lambda *_: None
        prompts = {number: words(number, 40 + number % 4 * 9) for number in range(12)}
        loaded = computed = 0
        for turn in range(TURNS):
            for number, ids in prompts.items():
                chat = KVTierCache(model, space, wait=5.0)
                prompts[number] = go_on(model, chat, ids, 100 * turn + number)
                loaded, computed = loaded + chat.loaded, computed + chat.computed
                if number % 3 == 2:
                    chat.saved().result()
            gc.collect()
            resident.append(process.memory_info().rss)
        used = {tier["tier"]: tier["used"] for tier in cache.status()["tiers"]}
    assert loaded > computed
    assert used["cpu"] <= 1 << 20
    assert 0 < used["nvme"] <= 4 << 20
    # All that is not stored for want of room is counted, and nothing else is.
    assert set(cache.counters) <= {"save_pressure", "save_client_busy"}
    assert resident[-1] - resident[1] < 32 << 20, resident


@contextmanager
def host(place):
    child = Child("host", *map(str, place), str(8 << 20))
    try:
        child.says()
        yield child
    finally:
        child.kill()


def test_kvtier_is_killed_and_restarted_in_the_middle_of_a_conversation():
    model, ids = make(), words(0, 40)
    with folders() as place:
        with host(place) as first:
            cache = kvtier.connect(place[0])
            space = space_of(cache, model)
            chat = KVTierCache(model, space, wait=1.0)
            ids = go_on(model, chat, ids, 1)
            assert chat.saved().result().refused == ""

            calls = iter(range(1, 1000))
            hook = model.lm_head.register_forward_hook(
                lambda *_: first.signal(signal.SIGKILL) if next(calls) == 10 else None
            )
            ids = go_on(model, chat, ids, 2)
            hook.remove()
            assert chat.saved().result().refused != ""
            # Nobody is there: a turn of this process, and of a new one.
            ids = go_on(model, chat, ids, 3)
            assert go_on(model, KVTierCache(model, space), ids, 4).shape == (len(ids) + ANSWER + 20,)
        with host(place), cache:
            until = time.monotonic() + 30.0
            while "error" in cache.status() and time.monotonic() < until:
                time.sleep(0.05)
            ids = go_on(model, chat, ids, 5)
            assert chat.saved().result(30.0).refused == ""
            # What died with the host was stored again, so that another process has hits.
            assert stored(space, ids) >= (len(ids) - 21) // BLOCK * BLOCK
            other = KVTierCache(model, space)
            go_on(model, other, ids, 6)
            assert other.loaded == (len(ids) - 21) // BLOCK * BLOCK

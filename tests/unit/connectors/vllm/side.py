"""The scheduler's side, driven step by step over a host's kvtier in this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Literal

import numpy as np

import kvtier
from kvtier.connectors.vllm.asking import LOOKUP
from kvtier.connectors.vllm.messages import Recipe
from kvtier.connectors.vllm.options import Options
from kvtier.connectors.vllm.scheduler import SchedulerSide
from kvtier.connectors.vllm.stored import Stored
from kvtier.spec import KVSpec
from tests.unit.connectors.vllm.engine import BLOCK, PAGE, Manager, Pool, Request

SPEC = KVSpec(2, 1, 8, "float32", block_tokens=BLOCK)
RECIPE = Recipe(SPEC, (), ()).but(model="m", plan="raw", layout="opaque:test", tp_size=1)
PROMPT = list(range(5 * BLOCK + 10))
PAGES = list(range(1, 23))
PATIENCE = Options().wait + LOOKUP


class Here:
    """The host's kvtier in this process, which can be away or hang."""

    def __init__(self, cache: kvtier.Cache) -> None:
        self.cache: kvtier.Cache | None = cache
        self.speeds: list[tuple[int, float]] = []
        self.said: list[str] = []
        self.free = threading.Event()
        self.free.set()

    def space(self, recipe: Recipe, rank: int) -> kvtier.Space | None:
        self.free.wait()
        return None if self.cache is None else recipe.open(self.cache, rank)

    def say(self, what: str) -> None:
        self.said.append(what)

    def computed(self, tokens: int, seconds: float) -> None:
        self.speeds.append((tokens, seconds))


class Engine:
    """One scheduler's side, driven step by step at a time of our choice."""

    def __init__(
        self,
        here: Here,
        *,
        pages: int = 400,
        ranks: int = 1,
        known: bool = True,
        load: Literal["async", "sync"] = "async",
    ) -> None:
        self.now = 0.0
        self.pool = Pool(pages)
        self.manager = Manager(self.pool)
        self.revision: Future[str] = Future()
        if known:
            self.revision.set_result("r")
        names = ("layers.0", "layers.1")
        stored = Stored(names, (0, 0), PAGE, SPEC, True, ranks, 1, RECIPE.but(tp_size=ranks))
        parts = {"loads": True, "saves": True, "link": here, "revision": self.revision}
        self.beside: object = None
        parts |= {"clock": lambda: self.now, "beside": lambda: self.beside}
        self.side = SchedulerSide(stored, Options(load=load), ranks=ranks, **parts)
        self.side.bind(self.manager)

    def arrive(self, name: str = "a", tokens: list[int] = PROMPT, *, answered: bool = True) -> Request:
        request = Request(name, tokens)
        self.side.arrived(request)
        self.manager.pages[name] = (PAGES,)
        if answered:
            self.answered(name)
        return request

    def answered(self, name: str = "a") -> None:
        lookup = self.side._sequences[name].lookup
        assert lookup is None or not wait([lookup], 30.0).not_done

    def admit(self, request: Request, local: int = 0) -> int:
        tokens, _ = self.side.matched(request, local)
        assert tokens is not None
        self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (PAGES,)), tokens)
        request.num_computed_tokens = local + tokens
        return tokens


def store(cache: kvtier.Cache, tokens: list[int], *, revision: str = "r", rank: int = 0, ranks: int = 1) -> None:
    space = RECIPE.but(revision=revision, tp_size=ranks).open(cache, rank)
    kv = np.zeros((2, 2, len(tokens), 1, 8), np.float32)
    assert space.save(tokens, kv).result().refused == ""


def leases(cache: kvtier.Cache) -> int:
    return int(cache.status()["leases"])

"""Lookups, away from the engine's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.block import address
from kvtier.client.hit import Hit
from kvtier.client.scope import Chain
from kvtier.client.space import Space
from kvtier.connectors.vllm.link import Link
from kvtier.connectors.vllm.messages import Recipe
from kvtier.connectors.vllm.stored import Stored
from kvtier.connectors.vllm.weights import Adapters
from kvtier.errors import KVTierError, SessionUnavailable

THREADS = 16
"""Lookups at a time: each may wait for blocks on their way up."""
PAUSE = 5.0
"""Seconds for which a host that hung is not asked again."""


@dataclass(frozen=True)
class Prompt:
    """What is looked up.

    Attributes:
        tokens: of the sequence so far.
        extra: what else each whole block depends on; None for nothing.
        lora: name and path of the request's LoRA.
    """

    tokens: Sequence[int] = field(repr=False)
    extra: Sequence[bytes] | None = field(repr=False)
    lora: tuple[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """The longest stored prefix of a prompt, leased until `close`.

    Attributes:
        recipe: its keyspace; None when that is not known (yet).
        keys: of its whole blocks.
        hits: one for each rank that has KV of its own.
        tokens: how many all of them have.
        served: for each block the number of the tier that served it.
        at: when it was found, on the monotonic clock.
        why: why nothing was looked up; empty when it was.
    """

    recipe: Recipe | None
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    hits: tuple[Hit, ...] = ()
    tokens: int = 0
    served: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8), repr=False)
    at: float = 0.0
    why: str = ""

    def close(self) -> None:
        """Give the leases back; idempotent, never waits."""
        for hit in self.hits:
            hit.close()


class Lookups:
    """Finds and leases prefixes on threads of its own.

    Args:
        link: to the host.
        stored: how the engine's layers lie in blocks.
        revision: done when the weights' revision is known.
        wait: seconds that a lookup may wait for blocks on their way up.
        clock: monotonic seconds.

    Attributes:
        generation: part of the keys once the weights may have changed; set by the scheduler's side.
    """

    def __init__(
        self,
        link: Link,
        stored: Stored,
        revision: Future[str],
        wait: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.generation = ""
        self._link, self._stored, self._revision, self._wait, self._clock = link, stored, revision, wait, clock
        self._adapters = Adapters()
        self._paused = 0.0
        self._threads = ThreadPoolExecutor(THREADS, "kvtier-lookup")

    def begin(self, prompt: Prompt) -> Future[Found]:
        """Look a prompt up; the future never holds an exception."""
        try:
            return self._threads.submit(self._run, prompt, self.generation)
        except RuntimeError:  # closed
            future: Future[Found] = Future()
            future.set_result(self._nothing(None, "closed"))
            return future

    def recipe(self, lora: tuple[str, str] | None, generation: str) -> Recipe | None:
        """What names the KV of a request; None while the weights' revision is not known. Reads a LoRA's files.

        Raises:
            ConfigError: the LoRA's files are not there, or were others.
        """
        if not self._revision.done():
            return None
        adapter = (lora[0], self._adapters.digest(*lora)) if lora else None
        return self._stored.named(self._revision.result(), generation, adapter)

    def close(self) -> None:
        """Stop; what is under way ends first."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, prompt: Prompt, generation: str) -> Found:
        try:
            return self._look(prompt, generation)
        except KVTierError as exc:
            self._link.say(str(exc))
            return self._nothing(None, type(exc).__name__)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the request is computed
            return self._nothing(None, f"bug_{type(exc).__name__}")

    def _look(self, prompt: Prompt, generation: str) -> Found:
        recipe = self.recipe(prompt.lora, generation)
        if recipe is None:
            return self._nothing(None, "starting")
        if self._clock() < self._paused:
            return self._nothing(recipe, "paused")
        spaces = [self._link.space(recipe, rank) for rank in range(self._stored.shards)]
        if any(space is None for space in spaces):
            return self._nothing(recipe, "unavailable")
        return self._match(prompt, recipe, [space for space in spaces if space is not None])

    def _match(self, prompt: Prompt, recipe: Recipe, spaces: list[Space]) -> Found:
        until = self._clock() + self._wait
        step = self._stored.block_tokens
        keys = tuple(spaces[0].keyspace.chain(prompt.tokens, extra=prompt.extra))
        blocks = min(len(keys), (len(prompt.tokens) - 1) // step)
        hits: list[Hit] = []
        for space in spaces:
            hit = self._gathered(space, keys[:blocks], until)
            hits.append(hit)
            blocks = hit.tokens // step
            if hit.problem:
                return self._unanswered(recipe, hits, hit.problem)
            if not blocks:
                break
        served = hits[0].served[:blocks]
        return Found(recipe, keys, tuple(hits), blocks * step, served, self._clock())

    def _gathered(self, space: Space, keys: Sequence[bytes], until: float) -> Hit:
        """Lease what is there, and what comes up in time."""
        hit = space.match(chain_of(space, keys), wait=max(0.0, until - self._clock()))
        hit.gather()
        return hit

    def _unanswered(self, recipe: Recipe, hits: Sequence[Hit], problem: str) -> Found:
        """The host is gone, or hangs: then the next requests do not wait for it, one after the other."""
        for hit in hits:
            hit.close()
        self._link.say("the host does not answer; requests are computed meanwhile")
        if problem == SessionUnavailable.__name__:
            return self._nothing(recipe, "unavailable")
        self._paused = self._clock() + PAUSE
        return self._nothing(recipe, problem)

    def _nothing(self, recipe: Recipe | None, why: str) -> Found:
        return Found(recipe, at=self._clock(), why=why)


def chain_of(space: Space, keys: Sequence[bytes]) -> Chain:
    """The blocks with these keys, of a space's rank."""
    return Chain(
        len(keys) * space.block_tokens, [address(key, space.rank) for key in keys], space.keyspace.root, space.rank
    )

"""The connector in the scheduler's process: what is promised, and what is saved.

It never waits for the host. A lookup begins when its request arrives, on a thread; a step takes the answers that are
there, waits a moment for those that are not, and else says "ask again". What was found stays leased from then until the
workers have loaded it, or the request ends. Pages that are being saved are held by references of their own.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from kvtier.connectors.vllm.asking import Asking
from kvtier.connectors.vllm.extra import Unstorable, extras
from kvtier.connectors.vllm.link import Link
from kvtier.connectors.vllm.lookup import Lookups
from kvtier.connectors.vllm.messages import Load, Outcome, Step
from kvtier.connectors.vllm.options import Options
from kvtier.connectors.vllm.saving import Saving
from kvtier.connectors.vllm.sequence import Sequence
from kvtier.connectors.vllm.speed import Speed
from kvtier.connectors.vllm.stored import Stored
from kvtier.tiers.base import TierNumber

SETTLING = 3.0
"""Seconds that vLLM may wait for pages that are being saved when it resets its prefix cache."""


class Beside(Protocol):
    """A worker in the scheduler's process."""

    def settle(self, seconds: float) -> Outcome:
        """Wait, so long at most, until nothing is being saved any more; what became of loads and saves."""


class SchedulerSide:
    """See the module. Used in the scheduler's thread only.

    Args:
        stored: how the engine's layers lie in blocks.
        options: of the connector.
        ranks: workers that answer.
        loads, saves: whether the engine's role has it load, and save.
        link: to the host.
        revision: done when the weights' revision is known.
        beside: the only worker, if it is in this process.
        clock: monotonic seconds.

    Attributes:
        counters: what happened, for vLLM's statistics; drained by whoever reports them.
    """

    def __init__(
        self,
        stored: Stored,
        options: Options,
        *,
        ranks: int,
        loads: bool,
        saves: bool,
        link: Link,
        revision: Future[str],
        beside: Callable[[], Beside | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._stored, self._ranks, self._link, self._clock = stored, ranks, link, clock
        self._beside = beside
        self._later, self._loads, self._saves = options.load == "async", loads, saves and options.save
        self._lookups = Lookups(link, stored, revision, options.wait, clock)
        self._sequences: dict[str, Sequence] = {}
        self._ending: dict[str, Sequence] = {}
        self._asking = Asking(stored, self._lookups, self.counters, options.wait, clock)
        self._promised: list[Load] = []
        self._saving = Saving(stored, link, self._lookups, self.counters, clock)
        self._answers = Outcome()
        # What would take longer to load than to compute is declined.
        self._speed = Speed(link.computed if options.decline else lambda tokens, seconds: None, clock)
        self._step = 0
        self._within: dict[str, list[int]] = {}
        self._manager: Any = None

    def bind(self, manager: Any) -> None:
        """Take vLLM's `KVCacheManager`, which knows the pages of every request.

        Its prefix cache can only be reset while nobody holds a page, and no connector is asked before. So this is
        where what is being saved is waited for, or given up.
        """
        self._manager = manager
        self._saving.bind(manager)
        reset = manager.reset_prefix_cache

        def settled() -> Any:
            self._settle()
            return reset()

        manager.reset_prefix_cache = settled

    def _settle(self) -> None:
        self._saving.give_up()
        if self.pending and (worker := self._beside()) is not None:
            self.done(worker.settle(SETTLING))

    # What a request may load

    def arrived(self, request: Any) -> None:
        """A request was added."""
        if getattr(request, "resumable", False):
            return  # its tokens may be replaced
        try:
            extras(request, self._stored.block_tokens, 0)
        except Unstorable as exc:
            self.counters[f"unstorable:{exc}"] += 1
            return
        sequence = self._sequences[request.request_id] = Sequence(request)
        self._asking.early(sequence)

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond the `local` ones that the engine has; None for "ask again"."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None or sequence.barred or request.skip_reading_prefix_cache:
            return 0, False
        found = self._asking.answer(sequence)
        if found is None:
            return None, False
        tokens = max(0, found.tokens - local) if self._loads else 0
        sequence.local = local
        return tokens, self._later and tokens > 0

    def allocated(self, request: Any, pages: Any, tokens: int) -> None:
        """Pages were allocated for a request, and so many tokens are to be loaded into them."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None or sequence.loading:
            return
        sequence.runs = False
        found = sequence.found
        if found is None or not tokens:
            sequence.let_go()
            return
        wanted = range(sequence.local, sequence.local + tokens)
        blocks = sequence.blocks(self._stored, wanted, pages.get_block_ids(), none=self._saving.none)
        self._promised.append(Load(request.request_id, blocks, layerwise=not self._later))
        sequence.loading = True
        self.counters["loads"] += 1

    def sources(self, request: Any, tokens: int) -> dict[TierNumber, int]:
        """Which tiers the promised tokens of a request come from."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None or sequence.found is None:
            return {}
        step, counted = self._stored.block_tokens, Counter[TierNumber]()
        for at in range(sequence.local, sequence.local + tokens, self._stored.page_tokens):
            counted[TierNumber(int(sequence.found.served[at // step]))] += self._stored.page_tokens
        return dict(counted)

    # A step

    def step(self, output: Any) -> Step:
        """What the workers have to do in a step."""
        loads, self._promised = tuple(self._promised), []
        saves = self._saving.due()
        if self._saves:
            for name, tokens in output.num_scheduled_tokens.items():
                sequence = self._sequences.get(name)
                if sequence is not None:
                    sequence.runs = True
                    end = min(sequence.request.num_computed_tokens + tokens, sequence.request.num_tokens)
                    saves += self._saving.complete(sequence, end)
        # What is loaded within a step is in vLLM's own cache from its beginning on, and shared there.
        within = any(load.layerwise for load in loads)
        self._within = {name: self._manager.get_block_ids(name)[0] for name in output.num_scheduled_tokens if within}
        self._step += 1
        self._asking.step(self._step, self._sequences.values())
        computes = output.total_num_scheduled_tokens > 0
        if computes:
            self._speed.begins(self._step, output.total_num_scheduled_tokens)
        return Step(loads, tuple(saves), computes, self._step)

    def done(self, outcome: Outcome | None) -> None:
        """What the workers answered to a step."""
        if not outcome:
            return
        self._speed.ended(outcome.step)
        answers = self._answers = self._answers.merge(outcome)
        for name in [name for name, (ranks, _) in answers.loaded.items() if ranks >= self._ranks]:
            self._was_loaded(name, answers.loaded.pop(name)[1])
        for number in [number for number, (ranks, _) in answers.saved.items() if ranks >= self._ranks]:
            self._saving.saved(number, answers.saved.pop(number)[1])

    def ended(self, request: Any, pages: tuple[list[int], ...]) -> None:
        """A request ended, and its pages are about to be freed."""
        sequence = self._sequences.pop(request.request_id, None)
        self._asking.forget(request.request_id)
        if sequence is None:
            return
        if self._saves and sequence.runs and not request.status.name.endswith("ERROR"):
            # Of tokens that were not known yet when they were computed: a step ago, when steps overlap.
            end = min(request.num_computed_tokens, request.num_tokens - 1)
            self._saving.later(sequence, end, pages)
        if sequence.loading:
            self._ending[request.request_id] = sequence
        else:
            sequence.let_go()

    @property
    def pending(self) -> bool:
        """Whether pages are held for saves: the engine goes on stepping until they are free."""
        return self._saving.pending

    @property
    def soon_free(self) -> bool:
        """Whether it is better to wait for pages that are being saved than to preempt a request."""
        return self._saving.soon_free

    def reset(self) -> None:
        """Use none of what was stored until now, because the weights may be others: vLLM's word for it.

        Nothing is deleted, for it may be other engines'. From now on this engine shares with none.
        """
        self._lookups.generation = uuid.uuid4().hex
        for sequence in self._sequences.values():
            if not sequence.loading:
                sequence.let_go()
            sequence.sound = False

    def close(self) -> None:
        """Give everything back."""
        for sequence in (*self._sequences.values(), *self._ending.values()):
            sequence.let_go()
        self._lookups.close()

    def drain(self) -> dict[str, int]:
        """What was counted since the last call."""
        counted = dict(self.counters)
        self.counters.clear()
        return counted

    def _was_loaded(self, name: str, upto: int) -> None:
        sequence = self._sequences.get(name) or self._ending.pop(name, None)
        if sequence is None or not sequence.loading:
            return
        sequence.loading = False
        found = sequence.found
        if found is not None:
            self.counters["loaded_tokens"] += max(0, min(upto, found.tokens) - sequence.local)
            if upto < found.tokens:
                self.counters["failed_tokens"] += found.tokens - max(upto, sequence.local)
                self._disown(self._within.get(name, [])[max(upto, sequence.local) // self._stored.page_tokens :])
                sequence.barred = True  # what is not loadable may be promised for ever: the rest of it is computed
                sequence.stored = min(sequence.stored, upto // self._stored.block_tokens)
        sequence.let_go()

    def _disown(self, bad: list[int]) -> None:
        """Nobody may find in vLLM's cache what a step should have loaded and could not, nor what it computed on it.

        vLLM computes that again, but its requests may be aborted or preempted before. Of several that share it one
        computes it for all, perhaps behind the others.
        """
        if not bad:
            return
        lost, missing = set[int](), set(bad)
        sharing = {name: pages for name, pages in self._within.items() if not missing.isdisjoint(pages)}
        for name, pages in sharing.items():
            lost.update(pages[next(at for at, page in enumerate(pages) if page in missing) :])
            if len(sharing) > 1 and (sequence := self._sequences.get(name)) is not None:
                sequence.sound = False
        self._manager.block_pool.evict_blocks(lost)

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
from concurrent.futures import wait as wait_for
from typing import Any, Protocol

from kvtier.connectors.vllm.extra import Unstorable, extras
from kvtier.connectors.vllm.held import HeldPages
from kvtier.connectors.vllm.link import Link
from kvtier.connectors.vllm.lookup import Found, Lookups, Prompt
from kvtier.connectors.vllm.messages import GONE, Blocks, Load, Outcome, Save, Step
from kvtier.connectors.vllm.options import Options
from kvtier.connectors.vllm.sequence import Sequence
from kvtier.connectors.vllm.speed import Speed
from kvtier.connectors.vllm.stored import Stored
from kvtier.keys import chain
from kvtier.tiers.base import TierNumber

STEP_WAIT = 0.002
"""Seconds that one step of the engine waits, in all, for lookups that began with it."""
SETTLING = 3.0
"""Seconds that vLLM may wait for pages that are being saved when it resets its prefix cache."""
LOOKUP = 1.5
"""Seconds, besides what it may wait for blocks, after which a lookup is a miss."""
KEPT = 10.0
"""Seconds after which what was found, and not used, is looked up anew: a request that waits long keeps no leases."""
EXPIRING = 1.0
"""Seconds between two looks at what was found too long ago."""
EARLY = 16
"""Requests that are looked up before the scheduler asks for them."""
AHEAD = 64
"""Waiting requests that are looked up, or have leases, at a time: those that the engine asks about first."""


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
        self._patience = options.wait + LOOKUP
        self._sequences: dict[str, Sequence] = {}
        self._ending: dict[str, Sequence] = {}
        self._looked: dict[str, Sequence] = {}
        self._promised: list[Load] = []
        self._late: list[Save] = []
        self._saving: dict[int, tuple[Sequence, int, int]] = {}
        self._numbers = 0
        self._answers = Outcome()
        self._left = STEP_WAIT
        # What would take longer to load than to compute is declined.
        self._speed = Speed(link.computed if options.decline else lambda tokens, seconds: None, clock)
        self._step = 0
        self._expiring = 0.0
        self._within: dict[str, list[int]] = {}
        self._manager: Any = None
        self._held: HeldPages | None = None

    def bind(self, manager: Any) -> None:
        """Take vLLM's `KVCacheManager`, which knows the pages of every request.

        Its prefix cache can only be reset while nobody holds a page, and no connector is asked before. So this is
        where what is being saved is waited for, or given up.
        """
        self._manager, self._held = manager, HeldPages(manager.block_pool, self._clock)
        reset = manager.reset_prefix_cache

        def settled() -> Any:
            self._settle()
            return reset()

        manager.reset_prefix_cache = settled

    def _settle(self) -> None:
        for save in self._late:  # no step will follow, perhaps
            self._was_saved(save.number, 0)
        self._late = []
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
        if not request.skip_reading_prefix_cache and self._ahead() < EARLY:
            self._ask(sequence)

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond the `local` ones that the engine has; None for "ask again"."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None or sequence.barred or request.skip_reading_prefix_cache:
            return 0, False
        self._expire(sequence)
        sequence.turn = self._step
        found = sequence.found or self._answer(sequence)
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
        start, step = sequence.local, self._stored.block_tokens
        origin = start // step * step
        blocks = self._blocks(sequence, start, start + tokens, origin, pages.get_block_ids())
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

    def _expire(self, sequence: Sequence) -> None:
        """Give back what was found long ago, and was not used: also for whoever is not asked about."""
        lookup, found = sequence.lookup, sequence.found
        if found is None and lookup is not None and lookup.done():
            found = lookup.result()
        if found is not None and not sequence.loading and self._clock() - found.at > KEPT:
            sequence.let_go()

    def _ask(self, sequence: Sequence) -> None:
        request, tokens = sequence.request, list(sequence.request.all_token_ids)
        extra = extras(request, self._stored.block_tokens, len(tokens) // self._stored.block_tokens)
        sequence.asked = self._clock()
        self._looked[request.request_id] = sequence
        sequence.lookup = self._lookups.begin(Prompt(tokens, extra, sequence.lora))

    def _ahead(self) -> int:
        """How many that wait are looked up, or have leases."""
        looked = self._looked.items()
        self._looked = {name: each for name, each in looked if each.keeps and not each.loading}
        return len(self._looked)

    def _room_ahead(self) -> bool:
        """Whether one more may be looked up, in place of one that the engine asks about later, perhaps."""
        if self._ahead() < AHEAD:
            return True
        later = next((each for each in self._looked.values() if each.turn != self._step), None)
        if later is not None:
            later.let_go()
        return later is not None

    def _answer(self, sequence: Sequence) -> Found | None:
        if sequence.lookup is None:
            if not self._room_ahead():
                return None
            self._ask(sequence)
        lookup = sequence.lookup
        if lookup is not None and not lookup.done() and self._left > 0:
            began = self._clock()
            wait_for((lookup,), timeout=self._left)
            self._left -= self._clock() - began
        if lookup is not None and lookup.done():
            found = lookup.result()
            sequence.take(found, self._stored.block_tokens)
            self._count(found, sequence.request.num_tokens)
        elif self._clock() - sequence.asked > self._patience:
            sequence.let_go()
            found = Found(None, at=self._clock(), why="late")
            sequence.take(found, self._stored.block_tokens)
            self._count(found, sequence.request.num_tokens)
        return sequence.found

    def _count(self, found: Found, tokens: int) -> None:
        if found.why:
            self.counters[f"missed:{found.why}"] += 1
            return
        self.counters["lookups"] += 1
        self.counters["asked_tokens"] += tokens
        self.counters["found_tokens"] += found.tokens

    # A step

    def step(self, output: Any) -> Step:
        """What the workers have to do in a step."""
        self._left = STEP_WAIT
        if self._clock() > self._expiring:
            self._expiring = self._clock() + EXPIRING
            for each in self._sequences.values():
                self._expire(each)
        loads, self._promised = tuple(self._promised), []
        saves, self._late = self._late, []
        if self._saves:
            for name, tokens in output.num_scheduled_tokens.items():
                sequence = self._sequences.get(name)
                if sequence is not None:
                    sequence.runs = True
                    end = min(sequence.request.num_computed_tokens + tokens, sequence.request.num_tokens)
                    saves += self._complete(sequence, end, None)
        # What is loaded within a step is in vLLM's own cache from its beginning on, and shared there.
        within = any(load.layerwise for load in loads)
        self._within = {name: self._manager.get_block_ids(name)[0] for name in output.num_scheduled_tokens if within}
        self._step += 1
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
            self._was_saved(number, answers.saved.pop(number)[1])

    def ended(self, request: Any, pages: tuple[list[int], ...]) -> None:
        """A request ended, and its pages are about to be freed."""
        sequence = self._sequences.pop(request.request_id, None)
        self._looked.pop(request.request_id, None)
        if sequence is None:
            return
        if self._saves and sequence.runs and not request.status.name.endswith("ERROR"):
            # Of tokens that were not known yet when they were computed: a step ago, when steps overlap.
            end = min(request.num_computed_tokens, request.num_tokens - 1)
            self._late += self._complete(sequence, end, pages)
        if sequence.loading:
            self._ending[request.request_id] = sequence
        else:
            sequence.let_go()

    @property
    def pending(self) -> bool:
        """Whether pages are held for saves: the engine goes on stepping until they are free."""
        return bool(self._held)

    @property
    def soon_free(self) -> bool:
        """Whether it is better to wait for pages that are being saved than to preempt a request."""
        return self._held is not None and self._held.soon_free

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

    def _complete(self, sequence: Sequence, end: int, pages: tuple[list[int], ...] | None) -> list[Save]:
        """Save the blocks before token `end` that are not stored yet; holds their pages."""
        step, first = self._stored.block_tokens, sequence.stored
        last = end // step
        if last <= first or self._held is None or sequence.loading or not self._hashed(sequence, last):
            return []
        if pages is None:
            pages = self._manager.get_block_ids(sequence.request.request_id)
        whole, last = last, min(last, first + self._held.room // (step // self._stored.page_tokens * len(pages)))
        if last < whole:  # the rest of them in a later step
            self.counters["refused:engine_pressure"] += max(0, whole - max(last, sequence.pressed))
            sequence.pressed = max(whole, sequence.pressed)
        if last == first:
            return []
        blocks = self._blocks(sequence, first * step, last * step, first * step, pages)
        held = [page for group in blocks.pages for page in group]
        if GONE in held:
            return []  # a window has passed what could not be saved in its time
        self._numbers += 1
        self._held.hold(self._numbers, held)
        self._saving[self._numbers] = sequence, first, last
        sequence.stored = last
        return [Save(self._numbers, blocks)]

    def _hashed(self, sequence: Sequence, blocks: int) -> bool:
        """Whether the keys of so many blocks are known; hashes what is new of them."""
        if sequence.recipe is None and sequence.lora is None:  # its lookup came too early, or was late
            sequence.recipe = self._lookups.recipe(None, self._lookups.generation)
        space = self._link.space(sequence.recipe, 0) if sequence.recipe is not None else None
        if space is None or not sequence.sound:
            return False
        keys, step = sequence.keys, self._stored.block_tokens
        if (had := len(keys)) < blocks:
            extra = extras(sequence.request, step, blocks)
            tokens = sequence.request.all_token_ids[had * step : blocks * step]
            root = keys[-1] if keys else space.keyspace.root
            keys += chain(root, tokens, step, extra=extra[had:] if extra is not None else None)
        return True

    def _blocks(self, sequence: Sequence, start: int, end: int, origin: int, pages: tuple[list[int], ...]) -> Blocks:
        page, keys = self._stored.page_tokens, tuple(sequence.keys[: end // self._stored.block_tokens])
        none = self._held.null if self._held is not None else 0
        part = slice(origin // page, end // page)
        return Blocks(
            sequence.recipe,
            keys,
            start,
            tuple(tuple(GONE if number == none else number for number in group[part]) for group in pages),
            origin,
        )

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

    def _was_saved(self, number: int, blocks: int) -> None:
        sequence, first, last = self._saving.pop(number)
        if self._held is not None:
            self._held.release(number)
        self.counters["saved_blocks"] += min(blocks, last - first)
        if first + blocks < last:  # refused: once more when its next block is complete
            sequence.stored = min(sequence.stored, first + blocks)

"""The page tables of all sequences over one pool of pages: arithmetic, no bytes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvtier.errors import ClosedError, ConfigError, UsageError
from kvtier.pages.names import NO_ROOT, Names
from kvtier.pages.pool import PagePool

Copy = Callable[[int, int, int], None]
"""Copies so many tokens from the beginning of one page to that of another: (from, to, tokens)."""


@dataclass(slots=True, eq=False)
class _Held:
    """What a sequence has."""

    pages: list[int]
    tokens: int
    freed: bool = False


class PageTable:
    """Where the tokens of one sequence lie: token t is in page `pages[t // page_tokens]`, at `t % page_tokens`.

    Its `PageTables` alone change it. One that is dropped without having been freed is freed by the next call there.
    """

    __slots__ = ("__weakref__", "_held")

    def __init__(self, held: _Held) -> None:
        self._held = held

    @property
    def tokens(self) -> int:
        """How many there are; 0 when it was freed."""
        return self._held.tokens

    @property
    def pages(self) -> tuple[int, ...]:
        """Numbers of the pages, just so many as the tokens need; none when it was freed."""
        return tuple(self._held.pages)


@dataclass(frozen=True, slots=True)
class _Growth:
    """What becomes of one sequence: so many pages come new, and its last one is exchanged for a copy, or stays."""

    held: _Held
    tokens: int
    fresh: int
    copied: bool


class PageTables:
    """Page tables over one pool: pages are shared when a sequence is forked, and copied when a shared one is written.

        a   [0][1][2]      fork        a   [0][1][2]      b grows       a   [0][1][2]
                           ---->       b   [0][1][2]      ------>       b   [0][1][3]     3: b's copy of 2

    Full pages are never copied, because nobody writes there; nor is a last page that only one sequence has. Each call
    is done whole, or raises and changes nothing. Thread-safe; one sequence belongs to one thread at a time.

    Args:
        count: pages of the pool.
        page_tokens: tokens in a page.
        copy: called before a table exchanges a shared page for a copy of its own; with the lock held.
    """

    def __init__(self, count: int, page_tokens: int, copy: Copy) -> None:
        if page_tokens < 1:
            raise ConfigError(f"pages of {page_tokens} tokens hold nothing; give them at least 1")
        self.page_tokens = page_tokens
        self._pool, self._names, self._copy = PagePool(count), Names(page_tokens), copy
        self._dropped = deque[list[int]]()
        self._of = weakref.WeakKeyDictionary[PageTable, _Held]()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Pages in all."""
        return self._pool.count

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        with self._lock:
            self._collect()
            return self._pool.free

    def references(self, page: int) -> int:
        """How many sequences have this page."""
        with self._lock:
            self._collect()
            return self._pool.references(page)

    def new(self) -> PageTable:
        """A sequence without tokens."""
        with self._lock:
            return self._table([], 0)

    def fork(self, table: PageTable, tokens: int | None = None) -> PageTable:
        """Another sequence that begins with the same tokens; no byte is copied until one of them grows.

        Args:
            table: which sequence.
            tokens: so many of its tokens; all of them unless given.
        """
        with self._lock:
            held = self._check(table)
            tokens = held.tokens if tokens is None else tokens
            pages = held.pages[: self._pages(tokens, at_most=held.tokens)]
            self._pool.retain(pages)
            return self._table(pages, tokens)

    def extend(self, growth: Iterable[tuple[PageTable, int]]) -> None:
        """Give sequences room for more tokens, in pages that are theirs alone to write from there on.

        Args:
            growth: each sequence once, and how many tokens it gets.

        Raises:
            PoolFull: there are not so many free pages; none of the sequences has grown.
        """
        with self._lock:
            self._collect()
            plan = self._plan(list(growth))
            taken = self._pool.take(sum(one.fresh + one.copied for one in plan))
            supply = iter(taken)
            copies = [(one.held, next(supply)) for one in plan if one.copied]
            try:
                for held, page in copies:
                    self._copy(held.pages[-1], page, held.tokens % self.page_tokens)
            except BaseException:
                self._pool.release(taken)
                raise
            for held, page in copies:
                self._release([held.pages[-1]])
                held.pages[-1] = page
            for one in plan:
                self._grow(one, [next(supply) for _ in range(one.fresh)])

    def cut(self, table: PageTable, tokens: int) -> None:
        """Keep the first so many tokens of a sequence; the pages behind them go."""
        with self._lock:
            held = self._check(table)
            keep = self._pages(tokens, at_most=held.tokens)
            gone = held.pages[keep:]
            del held.pages[keep:]
            held.tokens = tokens
            self._release(gone)

    def free(self, table: PageTable) -> None:
        """Give back a sequence's pages; each is free when no other sequence has it. What was freed stays so."""
        with self._lock:
            held = self._known(table)
            gone = list(held.pages)
            held.pages.clear()
            held.tokens, held.freed = 0, True
            self._release(gone)

    def name(self, table: PageTable, token_ids: Any, *, root: bytes = NO_ROOT) -> None:
        """Say which tokens a sequence's KV was computed from, so that `find` gives its full pages to others.

        A name goes with its page, when no sequence has that any more, or when it is written again.

        Args:
            table: which sequence; its KV is written.
            token_ids: of its tokens, from the first on.
            root: of the keyspace, where one pool holds KV of several (adapters, say).

        Raises:
            UsageError: a page of it was named for other tokens.
        """
        keys = self._names.keys(token_ids, root)
        with self._lock:
            held = self._check(table)
            self._names.give(held.pages[: held.tokens // self.page_tokens], keys)

    def find(self, token_ids: Any, *, root: bytes = NO_ROOT) -> PageTable:
        """A sequence that begins with these tokens, as many full pages of them as were named; arguments as for `name`.

        Who wants the logits of the last token leaves it out.
        """
        keys = self._names.keys(token_ids, root)
        with self._lock:
            self._collect()
            pages = self._names.find(keys)
            self._pool.retain(pages)
            return self._table(pages, len(pages) * self.page_tokens)

    def _table(self, pages: list[int], tokens: int) -> PageTable:
        held = _Held(pages, tokens)
        table = PageTable(held)
        self._of[table] = held
        weakref.finalize(table, self._dropped.append, pages).atexit = False
        return table

    def _plan(self, growth: list[tuple[PageTable, int]]) -> list[_Growth]:
        """What it takes: of the sequences that share a last page, one may stay with it if no other has it."""
        if len({id(table) for table, _ in growth}) != len(growth):
            raise UsageError("a sequence is named twice; name each once, with all the tokens that it gets")
        plan, references = [], dict[int, int]()
        for table, tokens in growth:
            if tokens < 0:
                raise UsageError(f"a sequence cannot grow by {tokens} tokens; cut() makes it shorter")
            held, copied = self._check(table), False
            if tokens and held.tokens % self.page_tokens:
                last = held.pages[-1]
                others = references.setdefault(last, self._pool.references(last)) - 1
                copied = others > 0
                references[last] = max(others, 1)
            fresh = self._pages(held.tokens + tokens) - len(held.pages)
            plan.append(_Growth(held, tokens, fresh, copied))
        return plan

    def _grow(self, one: _Growth, fresh: list[int]) -> None:
        held = one.held
        if one.tokens and held.tokens % self.page_tokens:
            self._names.forget(held.pages[-1])
        held.pages += fresh
        held.tokens += one.tokens

    def _known(self, table: PageTable) -> _Held:
        held = self._of.get(table)
        if held is None:
            raise UsageError("this sequence is of another pool")
        return held

    def _check(self, table: PageTable) -> _Held:
        held = self._known(table)
        if held.freed:
            raise ClosedError("this sequence was freed; make another with new(), fork() or find()")
        return held

    def _pages(self, tokens: int, *, at_most: int | None = None) -> int:
        """How many pages so many tokens need."""
        if at_most is not None and not 0 <= tokens <= at_most:
            raise UsageError(f"the sequence has {at_most} tokens; {tokens} of them cannot be kept")
        return -(-tokens // self.page_tokens)

    def _release(self, pages: list[int]) -> None:
        for page in self._pool.release(pages):
            self._names.forget(page)

    def _collect(self) -> None:
        """Free what was dropped: a finalizer may run anywhere, also with the lock held, and so only leaves a note."""
        while self._dropped:
            self._release(self._dropped.popleft())

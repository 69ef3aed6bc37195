"""Sequences in pages against lists of their tokens, and batches against dense tensors."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import ClosedError, PoolFull, UsageError
from kvtier.pages import Batch, PagedKV
from kvtier.spec import KVSpec

SPEC = KVSpec(2, 2, 3, "float32", v_head_dim=1)
ROOT = bytes(32)


def kv_of(tokens):
    """KV that tells which token it is of, and which layer, part, head and element: `[tokens, kv_heads, dim]` each."""
    values = torch.tensor(tokens, dtype=torch.float32)[:, None, None] * 64
    layers = range(SPEC.layers)
    return [
        tuple(values + 32 * layer + 16 * part + torch.arange(2 * dim).view(2, dim) for part, dim in enumerate((3, 1)))
        for layer in layers
    ]


def same(one, other):
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


class PagesMachine(RuleBasedStateMachine):
    """`held`: each sequence with the list of its tokens."""

    @initialize(count=st.integers(1, 12), page_tokens=st.sampled_from([1, 2, 3, 4]))
    def make(self, count, page_tokens):
        self.kv = PagedKV(SPEC, count, page_tokens=page_tokens)
        self.tables = self.kv.tables
        self.held = []

    def pick(self, data):
        """A number is drawn, because what is drawn is kept, and so would never be dropped."""
        return self.held[data.draw(st.integers(0, len(self.held) - 1))]

    def needed(self, grown):
        """Fresh pages, by counting what all sequences would need that do not share."""
        size, references = self.kv.page_tokens, self.references()
        need = 0
        for table, tokens in grown:
            before = len(table.pages)
            need += -(-(table.tokens + tokens) // size) - before
            if tokens and table.tokens % size and references[table.pages[-1]] > 1:
                need += 1
                references[table.pages[-1]] -= 1
        return need

    def references(self):
        return Counter(page for table, _ in self.held for page in table.pages)

    @rule()
    def new(self):
        self.held.append((self.tables.new(), []))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), max_size=9))
    def append(self, data, tokens):
        table, values = self.pick(data)
        need, free = self.needed([(table, len(tokens))]), self.tables.free_pages
        if need > free:
            with pytest.raises(PoolFull):
                self.kv.append(table, kv_of(tokens))
            assert self.tables.free_pages == free
            return
        self.kv.append(table, kv_of(tokens))
        assert self.tables.free_pages == free - need
        values += tokens

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def extend_together(self, data):
        """All or none, also where some share their last page."""
        chosen = data.draw(st.lists(st.sampled_from(range(len(self.held))), unique=True, min_size=2))
        grown = [(self.held[i], data.draw(st.integers(0, 5))) for i in chosen]
        growth = [(table, tokens) for (table, _), tokens in grown]
        if self.needed(growth) > self.tables.free_pages:
            before = [(table.tokens, table.pages) for table, _ in growth]
            with pytest.raises(PoolFull):
                self.tables.extend(growth)
            assert before == [(table.tokens, table.pages) for table, _ in growth]
            return
        self.tables.extend(growth)
        for (table, values), count in grown:
            tokens = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
            places = self.kv.places([table], len(values), table.tokens)
            for layer, parts in enumerate(kv_of(tokens)):
                self.kv.write(layer, places, [part.transpose(0, 1)[None] for part in parts])
            values.extend(tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), part=st.floats(0, 1))
    def fork(self, data, part):
        table, values = self.pick(data)
        tokens = round(part * len(values))
        free = self.tables.free_pages
        self.held.append((self.tables.fork(table, tokens), values[:tokens]))
        assert self.tables.free_pages == free

    @precondition(lambda self: self.held)
    @rule(data=st.data(), part=st.floats(0, 1))
    def cut(self, data, part):
        table, values = self.pick(data)
        del values[round(part * len(values)) :]
        self.tables.cut(table, len(values))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), dropped=st.booleans())
    def free(self, data, dropped):
        number = data.draw(st.sampled_from(range(len(self.held))))
        table, _ = self.held.pop(number)
        if dropped:
            del table
            gc.collect(0)
            return
        self.tables.free(table)
        self.tables.free(table)
        assert (table.tokens, table.pages) == (0, ())
        with pytest.raises(ClosedError):
            self.kv.append(table, kv_of([1]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name(self, data):
        table, values = self.pick(data)
        self.tables.name(table, values)
        found = self.tables.find(values)
        assert found.tokens == len(values) // self.kv.page_tokens * self.kv.page_tokens
        self.held.append((found, values[: found.tokens]))

    @rule(tokens=st.lists(st.integers(0, 2), max_size=12))
    def find(self, tokens):
        """Whatever is found has the KV of these tokens."""
        found = self.tables.find(tokens)
        assert found.tokens % self.kv.page_tokens == 0
        self.held.append((found, tokens[: found.tokens]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def misuse(self, data):
        table, values = self.pick(data)
        with pytest.raises(UsageError):
            self.tables.cut(table, len(values) + 1)
        with pytest.raises(UsageError):
            self.tables.extend([(table, 1), (table, 1)])
        with pytest.raises(UsageError):
            self.tables.extend([(table, -1)])
        with pytest.raises(UsageError):
            PagedKV(SPEC, 1).tables.fork(table)

    @invariant()
    def every_sequence_has_its_own_tokens(self):
        for table, values in getattr(self, "held", []):
            assert table.tokens == len(values)
            assert same(self.kv.gather(table), kv_of(values))

    @invariant()
    def pages_are_counted(self):
        if not hasattr(self, "kv"):
            return
        references = self.references()
        assert [self.tables.references(page) for page in range(self.tables.count)] == [
            references[page] for page in range(self.tables.count)
        ]
        assert self.tables.free_pages == self.tables.count - len(references)
        assert self.kv.held_nbytes == len(references) * self.kv.page_nbytes
        for table, values in self.held:
            assert len(table.pages) == -(-len(values) // self.kv.page_tokens)

    def teardown(self):
        """Nothing leaks."""
        if hasattr(self, "kv"):
            self.held.clear()
            gc.collect(0)
            assert self.tables.free_pages == self.tables.count


class BatchMachine(RuleBasedStateMachine):
    """`dense`: for each batch and layer K and V `[rows, kv_heads, tokens, dim]`."""

    @initialize(count=st.integers(4, 40))
    def make(self, count):
        self.kv = PagedKV(SPEC, count, page_tokens=4)
        self.batches = []
        self.generator = torch.Generator().manual_seed(0)

    def pick(self, data):
        return data.draw(st.sampled_from(self.batches))

    def random(self, rows, tokens):
        return [
            [torch.randn(rows, 2, tokens, dim, generator=self.generator) for dim in SPEC.head_dims]
            for _ in range(SPEC.layers)
        ]

    @precondition(lambda self: len(self.batches) < 4)
    @rule(rows=st.integers(1, 3))
    def start(self, rows):
        batch = Batch(self.kv)
        batch.start(rows)
        self.batches.append([batch, self.random(rows, 0)])

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def grow(self, data, tokens):
        """Layer by layer, as a model does it."""
        one = self.pick(data)
        batch, dense = one
        first, before = batch.tokens, [row.pages for row in batch.rows]
        try:
            batch.extend(tokens)
        except PoolFull:
            assert (batch.tokens, [row.pages for row in batch.rows]) == (first, before)
            return
        new = self.random(len(batch.rows), tokens)
        one[1] = [[torch.cat(pair, 2) for pair in zip(*layers, strict=True)] for layers in zip(dense, new, strict=True)]
        for layer in range(SPEC.layers):
            batch.write(layer, first, new[layer])
            assert same([batch.read(layer, batch.tokens)], [one[1][layer]])

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def select(self, data):
        one = self.pick(data)
        rows = data.draw(st.lists(st.sampled_from(range(len(one[0].rows))), min_size=1, max_size=4))
        one[0].select(rows)
        one[1] = [[part[rows] for part in layer] for layer in one[1]]

    @precondition(lambda self: self.batches and len(self.batches) < 4)
    @rule(data=st.data())
    def fork(self, data):
        batch, dense = self.pick(data)
        self.batches.append([batch.fork(), dense])

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), part=st.floats(0, 1))
    def cut(self, data, part):
        one = self.pick(data)
        tokens = round(part * one[0].tokens)
        one[0].cut(tokens)
        one[1] = [[part[:, :, :tokens] for part in layer] for layer in one[1]]

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def close(self, data):
        one = self.pick(data)
        self.batches.remove(one)
        one[0].close()
        assert one[0].tokens == 0

    @invariant()
    def batches_read_what_was_written_to_them(self):
        for batch, dense in getattr(self, "batches", []):
            assert same([batch.read(layer, batch.tokens) for layer in range(SPEC.layers)], dense)


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBatches = BatchMachine.TestCase
TestBatches.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

"""A store against a list of tokens: whatever comes, ages and is dropped, in any order."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codecs.scheme import Scheme
from kvtier.codecs.view import KVView
from kvtier.flow.pieces import PIECE, PieceCodec
from kvtier.flow.store import Scratch, Store
from kvtier.pruning.kept import Kept
from kvtier.spec import KVSpec

DIM = 32
SCHEMES = ["int8/channel:64/asym", "int4/channel:64/asym", "int4/token/sym/hadamard/lloyd", "raw", "e4m3/token/sym"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Oracle:
    """For each head the tokens that are held, each with its position and what it reads as; 64 at a time they age."""

    def __init__(self, heads, codec, dtype, *, exact, recent):
        self.codec, self.dtype, self.exact, self.recent = codec, dtype, exact, recent
        self.heads = [{"exact": [], "aged": [], "recent": []} for _ in range(heads)]
        self.came = 0
        self.sizes = [[] for _ in range(heads)]

    def append(self, keys, values):
        for head, regions in enumerate(self.heads):
            for t in range(keys.shape[1]):
                regions["recent"].append([self.came + t, keys[head, t], values[head, t]])
        self.came += keys.shape[1]

    def settle(self):
        for regions in self.heads:
            if self.codec is not None:
                regions["exact"], regions["recent"] = regions["recent"][: self.exact], regions["recent"][self.exact :]

    def round(self):
        for regions in self.heads:
            for token in regions["exact"] + regions["recent"]:
                token[1:] = [part.bfloat16().to(self.dtype) for part in token[1:]]

    def age(self):
        if self.codec is None:
            return
        for head, regions in enumerate(self.heads):
            held = sum(len(region) for region in regions.values())
            young = math.ceil(self.recent * held) if isinstance(self.recent, float) else self.recent
            for _ in range(max(0, len(regions["recent"]) - young) // PIECE):
                piece, regions["recent"] = regions["recent"][:PIECE], regions["recent"][PIECE:]
                keys, values = (torch.stack([token[i] for token in piece]).bfloat16()[:, None] for i in (1, 2))
                zero = np.zeros(1, np.int64)
                body = self.codec.encode(KVView.of([(keys, values)], self.codec.held), zero)
                out = [torch.empty(PIECE, 1, DIM, dtype=self.dtype) for _ in range(2)]
                view = KVView.of([tuple(out)], self.codec.read)
                self.codec.decode(body, zero, np.array([PIECE]), view, zero)
                for i, token in enumerate(piece):
                    token[1:] = [out[0][i, 0], out[1][i, 0], len(self.sizes[head])]
                self.sizes[head].append(PIECE)
                regions["aged"] += piece

    def tokens(self, head):
        return [token for region in self.heads[head].values() for token in region]

    def drop(self, head, stays):
        keep = iter(stays)
        for name, region in self.heads[head].items():
            self.heads[head][name] = [token for token in region if next(keep)]
        for number in range(len(self.sizes[head])):
            self.sizes[head][number] = sum(token[3] == number for token in self.heads[head]["aged"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(SCHEMES), min_size=2, max_size=2) | st.none(),
    st.sampled_from(["bfloat16", "float32"]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([0, 5, 70, 0.0, 0.25]),
    st.lists(st.tuples(st.sampled_from(["append", "one", "keep", "even"]), st.integers(1, 200)), max_size=8),
    st.integers(0, 2**16),
)
def test_a_store_is_a_list_of_tokens(texts, dtype, heads, exact, recent, steps, seed):
    spec = KVSpec(1, 1, DIM, dtype, block_tokens=PIECE)
    codec = texts and PieceCodec([Scheme.parse(text) for text in texts], (DIM, DIM), "bfloat16", dtype)
    scratch = Scratch(heads, spec)
    store = Store(scratch, codec, torch.bfloat16, exact=exact, recent=recent)
    oracle = Oracle(heads, codec, DTYPES[dtype], exact=exact, recent=recent)
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)

    def tokens(count):
        return tuple(torch.randn(heads, count, DIM, generator=generator).to(DTYPES[dtype]) for _ in range(2))

    for number, (what, count) in enumerate([("append", 150), ("even", 80), *steps]):
        if what in ("append", "one"):
            new = tokens(count if what == "append" else 1)
            keys, values = store.append(new)
            oracle.append(*new)
            check(oracle, keys, values)
            if store.settled:
                oracle.round()
                store.age()
                oracle.age()
        else:
            kept = chosen(oracle, store.columns, rng, count / 200, even=what == "even")
            if store.settled:
                store.keep(kept)
            else:
                store.settle(kept)
                oracle.settle()
            for head, row in enumerate(kept.columns.tolist()):
                pad = kept.before[head]
                stays = np.zeros(len(oracle.tokens(head)), bool)
                stays[[column - pad for column in row if column >= 0]] = True
                oracle.drop(head, stays)
            if number == 1:
                oracle.round()
                oracle.age()
        check(oracle, *store.read())
        check_bytes(oracle, store, codec)


class Chosen(Kept):
    before: list[int]


def chosen(oracle, width, rng, share, *, even):
    """Some columns of each head; even: as many of each."""
    counts = [len(oracle.tokens(head)) for head in range(len(oracle.heads))]
    left = [max(1, round(count * share)) for count in counts]
    left = [min(left)] * len(left) if even else left
    table = torch.full((len(counts), max(left)), -1)
    for head, (count, stay) in enumerate(zip(counts, left, strict=True)):
        columns = np.sort(rng.choice(count, stay, replace=False)) + width - count
        table[head, max(left) - stay :] = torch.from_numpy(columns)
    made = Chosen(table, table)
    object.__setattr__(made, "before", [width - count for count in counts])
    return made


def check(oracle, keys, values):
    for head in range(len(oracle.heads)):
        tokens = oracle.tokens(head)
        pad = keys.shape[1] - len(tokens)
        assert [token[0] for token in tokens] == sorted(token[0] for token in tokens)
        for part, i in ((keys, 1), (values, 2)):
            assert not part[head, :pad].any()
            if tokens:
                assert torch.equal(part[head, pad:], torch.stack([token[i].to(part.dtype) for token in tokens]))


def check_bytes(oracle, store, codec):
    """Regions have the bytes that their tokens have; the 16-bit ones are as wide as the head that holds most."""
    row = len(oracle.heads) * 2 * DIM * (2 if store.settled else oracle.dtype.itemsize)
    for name in ("exact", "recent"):
        widest = max(len(regions[name]) for regions in oracle.heads)
        assert store.nbytes[name] == widest * row
    sizes = np.array([size for head in oracle.sizes for size in head if size], np.int64)
    assert store.nbytes["aged"] == (int(codec.nbytes(sizes).sum()) if codec else 0)
    assert store.tokens.tolist() == [len(oracle.tokens(head)) for head in range(len(oracle.heads))]

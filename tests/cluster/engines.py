"""Engines in processes of their own, which may be killed at any moment; what they load is compared with an oracle.

All engines know the same documents: what the KV of a block is follows from its key alone, so every process can tell
whether bytes are right, whoever saved them.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import kvtier
from kvtier.client.scope import Chain
from kvtier.codecs.view import KVView
from kvtier.errors import SessionError

SHAPES = (
    ("raw", kvtier.KVSpec(4, 2, 64, "bfloat16", block_tokens=16)),
    ("raw", kvtier.KVSpec(4, 4, 64, "bfloat16", block_tokens=64)),
    ("int8", kvtier.KVSpec(4, 2, 64, "bfloat16", block_tokens=64)),
)
"""Keyspaces, with blocks of 32 KiB, 256 KiB and 64 KiB."""
DOCUMENTS = 60
STEM, BRANCH, BRANCHES = 6, 4, 3
"""Blocks that all readings of a document begin with, blocks of each one's own, and how many there are."""
GUARDED = 1 << 20
"""Documents from this number on are no engine's: tests write and read them."""
IDLE, LOADING, SAVING, MOVING = b"-lsm"

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


class Shelf:
    """One keyspace, its documents, and what their KV is."""

    def __init__(self, space: kvtier.Space) -> None:
        self.space = space
        spec = space.keyspace.spec
        self._block = (spec.layers, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)

    def chain(self, document: int, branch: int, blocks: int = STEM + BRANCH) -> Chain:
        """The first blocks of one reading of a document."""
        step = self.space.block_tokens
        stem = np.arange(STEM * step) + document * 4096
        own = np.arange(BRANCH * step) + document * 4096 + (branch + 1) * BRANCH * step * 16
        return self.space.chain(np.concatenate((stem, own))[: blocks * step].astype(np.uint32))

    def everything(self) -> list[Chain]:
        """All that engines may save."""
        return [self.chain(document, branch) for document in range(DOCUMENTS) for branch in range(BRANCHES)]

    def computed(self, chain: Chain) -> torch.Tensor:
        """What a model computes for it: bfloat16 of random bits, below 2 in size."""
        blocks = []
        for key in chain.addresses:
            bits = np.random.Generator(np.random.SFC64(list(key))).bytes(2 * int(np.prod(self._block)))
            blocks.append((np.frombuffer(bits, np.uint16) & 0xBFFF).reshape(self._block))
        if not blocks:
            return self.empty(0)
        return torch.from_numpy(np.concatenate(blocks, axis=2).view(np.int16)).view(torch.bfloat16)

    def stored(self, chain: Chain) -> torch.Tensor:
        """What a load of it must give: encoded and decoded by the keyspace's codec, without any cache."""
        kv, codec = self.computed(chain), self.space._scope.codec
        out, spec = torch.empty_like(kv), self.space.keyspace.spec
        positions = np.arange(len(chain.addresses))
        sizes = [-(-codec.nbytes(int(i)) // 64) * 64 for i in positions]
        places = np.cumsum([0, *sizes])
        memory = np.zeros(places[-1], np.uint8)
        where = (memory, places[:-1], positions)
        tokens, layers = positions * spec.block_tokens, range(spec.layers)
        assert codec.encode(KVView.of(kv, spec), tokens, *where, layers).all()
        codec.decode(*where, KVView.of(out, spec), tokens, layers)
        return out

    def empty(self, blocks: int) -> torch.Tensor:
        """Room for the KV of so many blocks."""
        layers, two, tokens, *rest = self._block
        return torch.zeros(layers, two, blocks * tokens, *rest, dtype=torch.bfloat16)

    def is_right(self, chain: Chain, kv: torch.Tensor, tokens: int) -> bool:
        """Whether the first tokens of `kv` are, bit for bit, what was stored."""
        loaded = kv[:, :, :tokens].view(torch.int16)
        return torch.equal(loaded, self.stored(chain.upto(tokens, self.space.block_tokens)).view(torch.int16))


def shelves(cache: kvtier.Cache) -> list[Shelf]:
    """All keyspaces that engines use."""
    return [Shelf(cache.keyspace(spec, model="soak", revision="1", plan=plan)) for plan, spec in SHAPES]


def served(shelf: Shelf, chain: Chain, wait: float = 10.0) -> int:
    """How many blocks of a chain are loaded; their bytes are right."""
    kv = shelf.empty(len(chain.addresses))
    with shelf.space.match(chain, wait=wait) as hit:
        tokens = hit.load(kv, verify=True)
    assert shelf.is_right(chain, kv, tokens), "wrong bytes"
    return tokens // shelf.space.block_tokens


class Wrong(Exception):
    """Bytes that are not what was stored."""


class Reader:
    """What one engine does, one thing after the other, by chance."""

    def __init__(self, cache: kvtier.Cache, seed: int, at: mmap.mmap) -> None:
        self.counts: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._shelves = shelves(cache)
        self._at = at
        self._acts = [self._read] * 6 + [self._save] * 2 + [self._prefetch, self._move, self._inspect]

    def act(self) -> None:
        """Do one thing.

        Raises:
            Wrong: bytes that were loaded are not what was stored.
        """
        chance = self._chance
        shelf, document = chance.choice(self._shelves), int(DOCUMENTS * chance.random() ** 2)
        act = chance.choice(self._acts)
        act(shelf, shelf.chain(document, chance.randrange(BRANCHES), chance.randint(1, STEM + BRANCH)))
        self._at[0] = IDLE
        self.counts[act.__name__.strip("_")] += 1

    def _read(self, shelf: Shelf, chain: Chain) -> None:
        """What a connector does with a prompt: load what there is, compute and save the rest."""
        kv = shelf.empty(len(chain.addresses))
        self._at[0] = LOADING
        with shelf.space.match(chain, wait=self._chance.choice((0.0, 0.05, 0.5))) as hit:
            tokens = hit.load(kv, verify=self._chance.random() < 0.5)
            self._at[0] = IDLE
            if not shelf.is_right(chain, kv, tokens):
                raise Wrong(f"{shelf.space.keyspace.plan} {chain} {tokens} tokens from {hit.tiers}")
            self.counts["loaded"] += tokens // shelf.space.block_tokens
            if tokens < chain.tokens and self._chance.random() < 0.5:
                kv[:, :, tokens:] = shelf.computed(chain)[:, :, tokens:]
                self._saved(shelf, chain, kv, tokens, hit)

    def _save(self, shelf: Shelf, chain: Chain) -> None:
        self._saved(shelf, chain, shelf.computed(chain), 0, None)

    def _saved(self, shelf: Shelf, chain: Chain, kv: torch.Tensor, start: int, after: kvtier.Hit | None) -> None:
        self._at[0] = SAVING
        saved = shelf.space.save(chain, kv, start=start, after=after).result()
        self.counts["saved"] += saved.blocks
        self.counts["refused"] += bool(saved.refused)

    def _prefetch(self, shelf: Shelf, chain: Chain) -> None:
        self._at[0] = MOVING
        future = shelf.space.prefetch(chain, tier=self._chance.choice(("cpu", "gpu")))
        if self._chance.random() < 0.5:
            future.result()

    def _move(self, shelf: Shelf, chain: Chain) -> None:
        self._at[0] = MOVING
        shelf.space.move(chain, self._chance.choice(("gpu", "cpu", "nvme", "nvme")), wait=1.0)

    def _inspect(self, shelf: Shelf, chain: Chain) -> None:
        shelf.space.inspect(chain)


def _live(socket: str, folder: str, seed: int) -> None:
    """An engine's whole life, until SIGTERM."""
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with Path(folder, f"{seed}.at").open("r+b") as file:
        at = mmap.mmap(file.fileno(), 1)
    cache = None
    while cache is None and not ended:
        try:
            cache = kvtier.connect(socket)
        except SessionError:
            time.sleep(0.05)
    if cache is None:
        return
    with cache:
        reader = Reader(cache, seed, at)
        wrong = ""
        try:
            while not ended:
                before = cache.counters.total()
                reader.act()
                if cache.counters.total() > before:  # refused, or nobody there
                    time.sleep(0.02)
        except Wrong as exc:
            wrong = str(exc)
        said = {"wrong": wrong, **reader.counts, **{f"client_{why}": n for why, n in cache.counters.items()}}
    Path(folder, f"{seed}.json").write_text(json.dumps(said))
    if wrong:
        raise Wrong(wrong)


@dataclass(frozen=True)
class Engine:
    """A running engine, as its test sees it."""

    process: multiprocessing.process.BaseProcess
    folder: Path
    seed: int

    @property
    def doing(self) -> int:
        """One of IDLE, LOADING, SAVING, MOVING; still so after its death."""
        return (self.folder / f"{self.seed}.at").read_bytes()[0]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join(30.0)
        assert self.process.exitcode == -signal.SIGKILL, f"engine {self.seed} had ended: {self.process.exitcode}"

    def end(self) -> Counter[str]:
        """Let it end by itself; what it counted."""
        self.process.terminate()
        self.process.join(60.0)
        assert self.process.exitcode == 0, f"engine {self.seed} ended with {self.process.exitcode}; see above"
        said = json.loads((self.folder / f"{self.seed}.json").read_text())
        assert not said.pop("wrong")
        return Counter(said)


@contextmanager
def starting(socket: Path, folder: Path) -> Iterator[Callable[[], Engine]]:
    """A function that starts one more engine on the host at `socket`; none of them outlives the context."""
    started: list[Engine] = []

    def start() -> Engine:
        seed = len(started)
        (folder / f"{seed}.at").write_bytes(bytes([IDLE]))
        process = _processes.Process(target=_live, args=(str(socket), str(folder), seed), daemon=True)
        process.start()
        started.append(Engine(process, folder, seed))
        return started[-1]

    try:
        yield start
    finally:
        for engine in started:
            engine.process.kill()

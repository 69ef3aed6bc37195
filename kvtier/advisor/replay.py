"""A request trace, run through a host without memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvtier.advisor.models import spec_of
from kvtier.advisor.tiers import SimulatedCpu, SimulatedGpu, SimulatedNvme
from kvtier.advisor.trace import BLOCK_TOKENS, Request
from kvtier.block import PAGE, BlockHeader, address, header_nbytes, slot_nbytes
from kvtier.codecs.registry import codec_for
from kvtier.errors import ConfigError
from kvtier.hierarchy import loading, saving
from kvtier.hierarchy.answers import GrantState
from kvtier.hierarchy.limits import Limits, Rules
from kvtier.hierarchy.loading import Look, Wish
from kvtier.hierarchy.mover import Mover
from kvtier.hierarchy.state import State
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.spec import KVSpec
from kvtier.tiers.base import Tier, TierNumber
from kvtier.tiers.nvme.regions import REGIONS_AT_LEAST

SESSION = 1
ENGINE_TOKENS = 64
"""Tokens of a block as engines save them. A trace's blocks are several of those: all bytes are divided by how many, so
that size classes, batches and regions hold as many blocks as they would."""
DAY = 86_400


@dataclass(frozen=True, slots=True)
class Setup:
    """What a host has, and how it is run.

    Attributes:
        gpu, cpu, nvme: bytes of each tier; 0 where there is none (the CPU tier is always there).
        model: name or path, as for `kvtier.advisor.models.spec_of`.
        plan: of all blocks.
        policy: eviction policy of the CPU tier.
        admission: what is written to NVMe.
        endurance: bytes that NVMe may write a day; 0 for no limit.
    """

    cpu: int
    gpu: int = 0
    nvme: int = 0
    model: str = "llama-3.1-8b"
    plan: str = "raw"
    policy: str = "lru"
    admission: str = "auto"
    endurance: int = 0


@dataclass(frozen=True, slots=True)
class Payloads:
    """How large blocks are.

    Attributes:
        first: bytes of a sequence's first block, header included.
        later: of every other one.
        header: what they all say of themselves.
    """

    first: int
    later: int
    header: BlockHeader

    @classmethod
    def of(cls, plan: str, spec: KVSpec) -> Payloads:
        """As the codec of this plan makes them."""
        codec = codec_for(plan, spec)
        front, later = header_nbytes(codec.plan), codec.nbytes(1)
        header = BlockHeader(bytes(32), 0, 1, spec.block_tokens, codec.number, codec.plan, spec.digest, later, 0)
        return cls(front + codec.nbytes(0), front + later, header)

    def shrunk(self, scale: int) -> Payloads:
        """All of it divided."""
        return Payloads(-(-self.first // scale), -(-self.later // scale), self.header)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay gave.

    Attributes:
        requests: how many.
        seconds: from the first to the last of them, by the trace.
        asked: blocks asked for.
        hits: blocks found, by the tier that had them.
        saved: blocks stored.
        unsaved: blocks that found no room.
        moved_nbytes: bytes moved, by (from, to).
        nvme: counters of the NVMe tier, in bytes where they are bytes.
        refused: blocks that were not written to NVMe, by reason.
    """

    requests: int
    seconds: float
    asked: int
    hits: dict[str, int]
    saved: int
    unsaved: int
    moved_nbytes: dict[tuple[str, str], int]
    nvme: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float:
        """Of all blocks asked for."""
        return sum(self.hits.values()) / self.asked if self.asked else 0.0

    @property
    def written_a_day(self) -> float:
        """Bytes that the device wrote, all overhead included, for a day like the trace."""
        return self.nvme.get("device_nbytes", 0) / max(self.seconds, 1.0) * DAY

    @property
    def write_amplification(self) -> float:
        """Bytes that the device wrote over bytes that it was given; 0 when nothing was written."""
        given = self.nvme.get("payload_nbytes", 0)
        return self.nvme.get("device_nbytes", 0) / given if given else 0.0


class _NoIndex(LocalIndex):
    """Nobody asks where these blocks are."""

    def add(self, keys: Sequence[bytes], tier: int, nbytes: Sequence[int]) -> None:
        pass

    def discard(self, keys: Sequence[bytes]) -> None:
        pass


class Host:
    """One host's table, policies, admission, moves and NVMe log, one request at a time.

    What a background thread would do is done before the next request: NVMe is taken to keep up.

    Args:
        payloads: how large blocks are.
        setup: its tiers and rules.
        limits: see `Limits`; the defaults for its CPU tier when not given.
    """

    def __init__(self, payloads: Payloads, setup: Setup, limits: Limits | None = None) -> None:
        self._payloads = payloads
        self._now = 0.0
        self._unsaved = 0
        self._addresses: dict[int, bytes] = {}
        tiers: dict[TierNumber, Tier] = {}
        if setup.gpu:
            tiers[TierNumber.GPU] = SimulatedGpu(setup.gpu)
        if setup.nvme:
            tiers[TierNumber.NVME] = SimulatedNvme(setup.nvme, payloads.header, self._clock)
        store = LocalStore()
        index = _NoIndex(store, store.register("replay"))
        rules = Rules(setup.policy, setup.admission, setup.endurance)
        self.state = State(SimulatedCpu(setup.cpu, payloads.header), tiers, index, self._clock, rules)
        self._limits = limits or Limits.of(setup.cpu)
        self._mover = Mover(self.state, high=self._limits.high, low=self._limits.low)
        self.state.ledger.attach(SESSION, "replay")

    def close(self) -> None:
        """End its threads."""
        self._mover.close()

    def ask(self, request: Request) -> None:
        """Load what is there of a prompt, and save the rest."""
        self._now = max(self._now, request.seconds)
        keys = [self._address(block) for block in request.blocks]
        self._save(keys, self._load(keys))

    def outcome(self, trace: Sequence[Request], scale: int = 1) -> Outcome:
        """What came of it; bytes are multiplied by `scale`."""
        state = self.state
        nvme = state.tiers.get(TierNumber.NVME)
        counters = nvme.usage().counters if nvme is not None else {}
        return Outcome(
            requests=len(trace),
            seconds=trace[-1].seconds - trace[0].seconds,
            asked=sum(len(request.blocks) for request in trace),
            hits=dict(state.stats.hits),
            saved=state.stats.stored,
            unsaved=self._unsaved,
            moved_nbytes={way: nbytes * scale for way, nbytes in state.stats.moved_nbytes.items()},
            nvme={name: n * (scale if name.endswith("_nbytes") else 1) for name, n in counters.items()},
            refused=dict(state.admission.refused),
        )

    def _clock(self) -> float:
        return self._now

    def _address(self, block: int) -> bytes:
        known = self._addresses.get(block)
        if known is None:
            known = self._addresses[block] = address(hashlib.sha256(str(block).encode()).digest())
        return known

    def _load(self, keys: list[bytes]) -> int:
        """How many of a chain's blocks are loaded; what must come up from other tiers is waited for."""
        look = self._look(keys)
        if look.staging is not None:
            self._release(look)
            look.staging.done.result()
            look = self._look(keys)
        loading.count(self.state, look)
        if len(look.rows) and TierNumber.GPU in self.state.tiers:
            self._mover.promote(look.matched.slots["offset"])
            self._mover.drain()
        self._release(look)
        return len(look.rows)

    def _look(self, keys: list[bytes]) -> Look:
        return loading.look(self.state, self._mover.stager, self._limits.session_leased, Wish(SESSION, keys))

    def _release(self, look: Look) -> None:
        lease = self.state.ledger.end_lease(look.matched.lease)
        if lease is not None:
            self.state.cpu.pool.release(lease.offsets)

    def _save(self, keys: list[bytes], start: int) -> None:
        """Save a chain from a block on; after a refusal once more, when the mover has made room."""
        stuck = False
        while start < len(keys):
            sizes = [self._payloads.later if place else self._payloads.first for place in range(start, len(keys))]
            reserved = saving.reserve(self.state, self._limits, SESSION, keys, sizes, start)
            states = reserved.grants["state"]
            if reserved.ticket:
                written = np.flatnonzero(states == GrantState.GRANTED).tolist()
                saving.commit(self.state, SESSION, reserved.ticket, written)
            refused = np.flatnonzero(states == GrantState.REFUSED)
            self._relieve(sum(map(slot_nbytes, sizes[-len(refused) :])) if reserved.reason == "pressure" else 0)
            if not len(refused):
                return
            if stuck and not refused[0]:
                self._unsaved += len(refused)
                return
            stuck = not refused[0]
            start += int(refused[0])

    def _relieve(self, short: int) -> None:
        """What the keeper does when a save went beyond the high watermark, or was refused so many bytes."""
        pool = self.state.cpu.pool
        if TierNumber.NVME in self.state.tiers and (short or pool.used > self._limits.high * pool.capacity):
            kept = saving.staging_nbytes(self.state, self._limits)
            self._mover.kick(short=kept + short if short else 0)
            self._mover.drain()


def why_not(setup: Setup, spec: KVSpec) -> str:
    """What is too small for a setup to work; empty when nothing is.

    Raises:
        ConfigError: an unknown plan.
    """
    payloads = Payloads.of(setup.plan, spec)
    block = max(payloads.first, payloads.later)
    says = f"a block of {spec.block_tokens} tokens of {setup.model} has {block:,} bytes under the plan {setup.plan!r}"
    if setup.cpu < 2 * block:
        return f"a CPU tier of {setup.cpu:,} bytes is too small: {says}; give it at least twice as many"
    least = REGIONS_AT_LEAST * (block + REGIONS_AT_LEAST * PAGE * scale_of(spec))
    if 0 < setup.nvme < least:
        return f"an NVMe tier of {setup.nvme:,} bytes is too small: {says}; give it at least {least:,}, or none"
    return ""


def scale_of(spec: KVSpec) -> int:
    """How many blocks of an engine one of a trace's blocks is."""
    return max(1, spec.block_tokens // ENGINE_TOKENS)


def replay(trace: Sequence[Request], setup: Setup, block_tokens: int = BLOCK_TOKENS) -> Outcome:
    """Run a trace through a host.

    Args:
        trace: requests, in the order in which they came.
        setup: the host.
        block_tokens: tokens that an id of the trace stands for.

    Raises:
        ConfigError: a tier is too small; an unknown model, plan or rule.
    """
    spec = spec_of(setup.model, block_tokens)
    if why := why_not(setup, spec):
        raise ConfigError(why)
    scale = scale_of(spec)
    tiers = {name: getattr(setup, name) // scale for name in ("gpu", "cpu", "nvme")}
    host = Host(Payloads.of(setup.plan, spec).shrunk(scale), replace(setup, **tiers))
    try:
        for request in trace:
            host.ask(request)
        return host.outcome(trace, scale)
    finally:
        host.close()

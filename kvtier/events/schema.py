"""Events and batches as they travel: msgpack, as vLLM has them, with `node` and `tier` of our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from kvtier.hierarchy.news import Change, Entered, Run
from kvtier.tiers.base import TierNumber

BlockHash: TypeAlias = bytes | int
"""Of kvtier always bytes: the 34-byte block address. Engines may send integers."""

MEDIUM = {TierNumber.GPU: "GPU", TierNumber.CPU: "CPU", TierNumber.NVME: "STORAGE"}
"""vLLM's words for where a block is."""
LOCAL = "LOCAL"
BLOCKS = 1024
"""Blocks of one batch."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """What happened to some blocks of one host: a map with its class's name as `type`; unknown keys are ignored."""


class BlockStored(Event, frozen=True):
    """A tier has these blocks now, each the parent of the next.

    Attributes:
        block_hashes: the blocks.
        parent_block_hash: the block before the first; None at the beginning of a chain, and where it is not known.
        token_ids: always empty: hosts see keys, not tokens.
        block_size: tokens in each block.
        lora_id, lora_name: None: adapters are part of the key.
        medium: "GPU", "CPU" or "STORAGE".
        locality: "LOCAL".
        node: name of the host.
        tier: kvtier's name of the medium: "gpu", "cpu" or "nvme".
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    node: str = ""
    tier: str = ""


class BlockRemoved(Event, frozen=True):
    """A tier has these blocks no more; other tiers of the host may."""

    block_hashes: list[BlockHash]
    medium: str | None
    locality: str | None = None
    node: str = ""
    tier: str = ""


class AllBlocksCleared(Event, frozen=True):
    """The host has nothing: it has just begun, or it ends."""

    node: str = ""


AnyEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A batch: an array of three.

    Attributes:
        ts: seconds since the epoch.
        events: in the order in which they happened.
        data_parallel_rank: None: a host is no rank.
    """

    ts: float
    events: list[AnyEvent]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)


def encode(ts: float, events: list[AnyEvent]) -> bytes:
    """The payload of a batch."""
    return _encoder.encode(Payload(ts, events))


def decode(payload: bytes) -> Payload:
    """Read the payload of a batch.

    Raises:
        msgspec.DecodeError: it is none (`msgspec.ValidationError` is one too).
    """
    return _decoder.decode(payload)


def batches(changes: Iterable[Change], node: str) -> Iterator[list[AnyEvent]]:
    """Changes as events, in batches of `BLOCKS` blocks at most."""
    batch: list[AnyEvent] = []
    room = BLOCKS
    for change in changes:
        runs = change.runs if isinstance(change, Entered) else [Run(change.keys, None, 0)]
        for run in runs:
            at = 0
            while at < len(run.keys):
                part = run.keys[at : at + room]
                parent = run.keys[at - 1] if at else run.parent
                batch.append(_event(change, part, parent, run.tokens, node))
                at += len(part)
                room -= len(part)
                if not room:
                    yield batch
                    batch, room = [], BLOCKS
    if batch:
        yield batch


def _event(change: Change, keys: list[bytes], parent: bytes | None, tokens: int, node: str) -> AnyEvent:
    medium, tier, hashes = MEDIUM[change.tier], change.tier.name.lower(), list[BlockHash](keys)
    if isinstance(change, Entered):
        return BlockStored(hashes, parent, [], tokens, None, medium, None, LOCAL, node, tier)
    return BlockRemoved(hashes, medium, LOCAL, node, tier)

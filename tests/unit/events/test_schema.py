"""What a host publishes, read by others: structs written from vLLM's published schema, and plain msgpack."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from kvtier.events.schema import BLOCKS, AllBlocksCleared, BlockRemoved, BlockStored, batches, decode, encode
from kvtier.hierarchy.news import Entered, Left, Run
from kvtier.testing.payloads import key_of
from kvtier.tiers.base import TierNumber


class Theirs:
    """vLLM's structs as of 0.24 to 0.29: a batch is an array, an event a map with a tag."""

    class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
        pass

    class BlockStored(Event, tag="BlockStored"):
        block_hashes: list[bytes | int]
        parent_block_hash: bytes | int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None
        kv_cache_spec_sliding_window: int | None = None
        locality: str | None = None
        ownership: str | None = None

    class BlockRemoved(Event, tag="BlockRemoved"):
        block_hashes: list[bytes | int]
        medium: str | None
        group_idx: int | None = None
        locality: str | None = None
        ownership: str | None = None

    class AllBlocksCleared(Event, tag="AllBlocksCleared"):
        pass

    class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
        ts: float
        events: list[Theirs.BlockStored | Theirs.BlockRemoved | Theirs.AllBlocksCleared]
        data_parallel_rank: int | None = None


def keys(*seeds: int) -> list[bytes]:
    return [key_of(seed) for seed in seeds]


def test_vllms_own_decoder_reads_it():
    entered = Entered(TierNumber.NVME, [Run(keys(1, 2), key_of(0), 64)])
    (events,) = batches([entered, Left(TierNumber.GPU, keys(3))], "box")
    batch = msgspec.msgpack.decode(encode(12.5, [*events, AllBlocksCleared("box")]), type=Theirs.Batch)
    stored, removed, cleared = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (12.5, None)
    assert (stored.block_hashes, stored.parent_block_hash) == (keys(1, 2), key_of(0))
    assert (stored.token_ids, stored.block_size) == ([], 64)
    assert (stored.lora_id, stored.lora_name, stored.medium, stored.locality) == (None, None, "STORAGE", "LOCAL")
    assert (removed.block_hashes, removed.medium, removed.locality) == (keys(3), "GPU", "LOCAL")
    assert isinstance(cleared, Theirs.AllBlocksCleared)


def test_byte_by_byte():
    (events,) = batches([Entered(TierNumber.CPU, [Run(keys(1), None, 64)])], "box")
    assert msgpack.unpackb(encode(1.0, events)) == [
        1.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": keys(1),
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 64,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
                "locality": "LOCAL",
                "node": "box",
                "tier": "cpu",
            }
        ],
        None,
    ]


def test_what_an_engine_publishes_is_read_too():
    theirs = Theirs.BlockStored([7], 6, [1, 2], 2, None, "GPU", None, group_idx=0)
    (event,) = decode(msgspec.msgpack.encode(Theirs.Batch(1.0, [theirs], 0))).events
    assert event == BlockStored([7], 6, [1, 2], 2, None, "GPU", None)


def test_long_chains_are_cut_into_batches_that_hang_together():
    chain = keys(*range(BLOCKS + 10))
    first, second = batches([Entered(TierNumber.CPU, [Run(chain, None, 64)]), Left(TierNumber.CPU, chain[:3])], "box")
    assert first[0].block_hashes == chain[:BLOCKS]
    assert second == [
        BlockStored(chain[BLOCKS:], chain[BLOCKS - 1], [], 64, None, "CPU", None, "LOCAL", "box", "cpu"),
        BlockRemoved(chain[:3], "CPU", "LOCAL", "box", "cpu"),
    ]


@pytest.mark.parametrize("junk", [b"", b"\x00", b"[]", msgpack.packb([1.0, [{"type": "Other"}], None])])
def test_what_is_no_batch_is_refused(junk):
    with pytest.raises(msgspec.DecodeError):
        decode(junk)

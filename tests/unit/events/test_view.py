"""A router's view of a host follows its events."""

from __future__ import annotations

from kvtier.events import Batch, View
from kvtier.events.schema import AllBlocksCleared, BlockRemoved, BlockStored


def stored(*blocks: bytes, tier: str = "cpu") -> BlockStored:
    return BlockStored(list(blocks), None, [], 64, None, tier.upper(), None, tier=tier)


def removed(*blocks: bytes, tier: str = "cpu") -> BlockRemoved:
    return BlockRemoved(list(blocks), tier.upper(), tier=tier)


def view_of(*events, fresh: bool = False) -> View:
    view = View()
    view.apply(Batch(1, 0.0, events, fresh))
    return view


def test_a_prefix_ends_where_a_block_is_missing():
    view = view_of(stored(b"a", b"b", b"d"))
    assert [view.prefix(chain) for chain in ([b"a", b"b", b"c", b"d"], [b"c"], [])] == [2, 0, 0]


def test_a_block_is_there_while_one_tier_has_it():
    view = view_of(stored(b"a"), stored(b"a", tier="nvme"), removed(b"a"))
    assert view.tiers(b"a") == ("nvme",)
    view.apply(Batch(2, 0.0, (removed(b"a", tier="nvme"),)))
    assert (view.tiers(b"a"), len(view), view.prefix([b"a"])) == ((), 0, 0)


def test_what_is_said_twice_changes_nothing():
    assert view_of(stored(b"a"), stored(b"a"), removed(b"b")).tiers(b"a") == ("cpu",)


def test_a_fresh_batch_and_a_cleared_host_forget_what_was():
    view = view_of(stored(b"a"))
    view.apply(Batch(2, 0.0, (stored(b"b"),), fresh=True))
    assert (view.prefix([b"a"]), view.prefix([b"b"])) == (0, 1)
    view.apply(Batch(3, 0.0, (AllBlocksCleared(), stored(b"c"))))
    assert (len(view), view.prefix([b"c"])) == (1, 1)


def test_an_engines_events_name_no_tier():
    view = view_of(BlockStored([7], None, [1], 1, None, "GPU", None), BlockStored([8], 7, [2], 1, None, None, None))
    assert (view.tiers(7), view.tiers(8)) == (("gpu",), ("gpu",))

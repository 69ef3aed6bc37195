"""What every `Index` must pass.

Subclass `IndexKit` and give a pytest fixture `make_index`: called with a `Life`, it makes an index of one shared store,
and closes it at the end.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable

import pytest

from kvtier.errors import UsageError
from kvtier.index.base import MAX_REPLICAS, Index, Life, Replica

MakeIndex = Callable[[Life], Index]

ALICE = Life(1, 100, "alice", "alice:7070")
BOB = Life(2, 100, "bob")
TIMEOUT = 5.0


def key(number: int) -> bytes:
    """A block address."""
    return number.to_bytes(32, "big") + b"\0\0"


def eventually(check: Callable[[], bool]) -> bool:
    """Poll until `check` holds; False when it does not in time."""
    deadline = time.monotonic() + TIMEOUT
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def told(index: Index) -> Index:
    """Flush, and insist that it worked."""
    assert index.flush(TIMEOUT), index.status()
    return index


def shows(index: Index, number: int, expected: Iterable[Replica]) -> bool:
    """Whether a lookup of this key comes to answer exactly these replicas, in any order."""
    wanted = sorted(expected, key=lambda replica: replica.node)

    def check() -> bool:
        found = index.match([key(number)])
        return found is not None and sorted(found[0], key=lambda replica: replica.node) == wanted

    return eventually(check)


def replica(life: Life, tier: int, nbytes: int) -> Replica:
    """What `life` tells."""
    return Replica(life.node, life.incarnation, tier, nbytes)


class IndexKit:
    """Laws of `kvtier.index.base.Index`."""

    def test_an_unknown_key_is_nowhere(self, make_index: MakeIndex) -> None:
        index = make_index(ALICE)
        assert index.match([key(1), key(2)]) == [(), ()]
        assert index.match([]) == []

    def test_what_was_added_is_found_in_the_order_asked(self, make_index: MakeIndex) -> None:
        index = make_index(ALICE)
        index.add([key(1), key(2)], 2, [10, 20])
        told(index)
        one, two = (replica(ALICE, 2, 10),), (replica(ALICE, 2, 20),)
        assert index.match([key(2), key(3), key(1), key(2)]) == [two, (), one, two]

    def test_adding_again_replaces(self, make_index: MakeIndex) -> None:
        index = make_index(ALICE)
        index.add([key(1)], 2, [10])
        told(index)
        index.add([key(1)], 3, [11])
        assert told(index).match([key(1)]) == [(replica(ALICE, 3, 11),)]

    def test_the_last_word_wins(self, make_index: MakeIndex) -> None:
        index = make_index(ALICE)
        index.add([key(1), key(2)], 2, [1, 1])
        index.discard([key(1), key(2), key(3)])
        index.add([key(2)], 3, [2])
        assert told(index).match([key(1), key(2), key(3)]) == [(), (replica(ALICE, 3, 2),), ()]

    def test_the_widest_numbers_fit(self, make_index: MakeIndex) -> None:
        life = Life(65_535, 2**32 - 1, "wide")
        index = make_index(life)
        index.add([key(1)], 255, [2**32 - 1])
        assert told(index).match([key(1)]) == [(replica(life, 255, 2**32 - 1),)]
        with pytest.raises(UsageError):
            index.add([key(1)], 2, [2**32])
        with pytest.raises(UsageError):
            make_index(Life(65_536, 1, "wider"))

    def test_hosts_see_each_other_and_discard_only_their_own(self, make_index: MakeIndex) -> None:
        alice, bob = make_index(ALICE), make_index(BOB)
        alice.add([key(1)], 2, [10])
        told(alice)
        bob.add([key(1)], 3, [10])
        told(bob)
        both = [replica(ALICE, 2, 10), replica(BOB, 3, 10)]
        assert shows(alice, 1, both)
        assert shows(bob, 1, both)
        alice.discard([key(1)])
        told(alice)
        assert shows(bob, 1, both[1:])
        assert eventually(alice.others)
        assert {node.host: node.door for node in alice.nodes()} == {"alice": "alice:7070", "bob": ""}

    def test_a_single_host_has_no_others(self, make_index: MakeIndex) -> None:
        assert not told(make_index(ALICE)).others()

    def test_at_most_so_many_replicas_the_newest(self, make_index: MakeIndex) -> None:
        lives = [Life(number, 1, f"host{number}") for number in range(1, MAX_REPLICAS + 3)]
        indexes = [make_index(life) for life in lives]
        for index in indexes:
            index.add([key(1)], 2, [1])
            told(index)
        assert shows(indexes[0], 1, [replica(life, 2, 1) for life in lives[-MAX_REPLICAS:]])

    def test_a_new_life_ends_the_old_one(self, make_index: MakeIndex) -> None:
        old, bob = make_index(ALICE), make_index(BOB)
        old.add([key(1), key(2)], 2, [1, 1])
        told(old)
        reborn = Life(1, 101, "alice")
        new = make_index(reborn)
        new.add([key(2)], 2, [2])
        told(new)
        for index in (new, bob):
            assert shows(index, 1, [])
            assert shows(index, 2, [replica(reborn, 2, 2)])
        old.add([key(2), key(3)], 2, [9, 9])
        old.discard([key(2)])
        old.flush(TIMEOUT)
        assert shows(bob, 2, [replica(reborn, 2, 2)])
        assert shows(bob, 3, [])
        assert not old.status()["ok"]

    def test_a_forgotten_host_is_gone(self, make_index: MakeIndex) -> None:
        alice, bob = make_index(ALICE), make_index(BOB)
        bob.add([key(1)], 2, [1])
        told(bob)
        assert shows(alice, 1, [replica(BOB, 2, 1)])
        bob.close()
        alice.forget(BOB.node)
        assert shows(alice, 1, [])
        assert not alice.others()
        assert [node.host for node in alice.nodes()] == ["alice"]

    def test_publishing_is_due_at_first_and_tells_all(self, make_index: MakeIndex) -> None:
        index = make_index(ALICE)
        assert index.needs_publish()
        index.publish((key(number), 2, number) for number in range(1, 2000))
        assert not index.needs_publish()
        assert index.match([key(1), key(1999)]) == [(replica(ALICE, 2, 1),), (replica(ALICE, 2, 1999),)]

    def test_what_is_discarded_while_publishing_stays_discarded(self, make_index: MakeIndex) -> None:
        index = make_index(ALICE)

        def inventory() -> Iterable[tuple[bytes, int, int]]:
            for number in range(1, 1500):
                yield key(number), 2, 1
                if number == 700:
                    index.discard([key(1), key(700)])

        index.publish(inventory())
        told(index)
        assert index.match([key(1), key(700)]) == [(), ()]
        assert index.match([key(2), key(1499)]) == [(replica(ALICE, 2, 1),)] * 2

    def test_what_is_added_while_publishing_is_as_it_was_added(self, make_index: MakeIndex) -> None:
        index = make_index(ALICE)

        def inventory() -> Iterable[tuple[bytes, int, int]]:
            for number in range(1, 1500):
                if number in (2, 600):  # read before it was moved, told after
                    index.add([key(number)], 3, [5])
                    told(index)
                yield key(number), 2, 1

        index.publish(inventory())
        told(index)
        assert index.match([key(2), key(600), key(1499)]) == [
            (replica(ALICE, 3, 5),),
            (replica(ALICE, 3, 5),),
            (replica(ALICE, 2, 1),),
        ]

    def test_threads_may_share_it(self, make_index: MakeIndex) -> None:
        index = make_index(ALICE)

        def work(start: int) -> None:
            for number in range(start, start + 200):
                index.add([key(number)], 2, [number])
                index.match([key(number)])

        threads = [threading.Thread(target=work, args=(1000 * part,)) for part in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told(index)
        numbers = [1000 * part + number for part in range(1, 5) for number in range(200)]
        assert index.match([key(number) for number in numbers]) == [(replica(ALICE, 2, number),) for number in numbers]

    def test_it_agrees_with_a_dictionary(self, make_index: MakeIndex) -> None:
        rng = random.Random(7)  # noqa: S311
        lives = [ALICE, BOB]
        indexes = [make_index(life) for life in lives]
        expected: dict[tuple[int, int], Replica] = {}
        for _ in range(300):
            who, number = rng.randrange(2), rng.randrange(40)
            if rng.random() < 0.6:
                tier, size = rng.choice((1, 2, 3)), rng.randrange(1, 5)
                indexes[who].add([key(number)], tier, [size])
                expected[number, who] = replica(lives[who], tier, size)
            else:
                indexes[who].discard([key(number)])
                expected.pop((number, who), None)
        for index in indexes:
            told(index)
        for index in indexes:
            for number in range(40):
                assert shows(index, number, [expected[number, who] for who in (0, 1) if (number, who) in expected])

    def test_what_the_index_lacks_of_a_host_is_said(self, make_index: MakeIndex) -> None:
        alice, bob = make_index(ALICE), make_index(BOB)
        alice.add([key(1), key(2), key(3)], 2, [10, 10, 10])
        told(alice)
        bob.add([key(4)], 2, [10])
        told(bob)
        held = [(key(1), 2, 10), (key(2), 3, 10), (key(3), 2, 11), (key(4), 2, 10), (key(5), 2, 10)]
        assert alice.lacking(held) == [key(2), key(3), key(4), key(5)]
        assert alice.lacking([]) == []

    def test_a_block_that_so_many_others_have_need_not_be_told(self, make_index: MakeIndex) -> None:
        lives = [Life(number, 1, f"host{number}") for number in range(1, MAX_REPLICAS + 2)]
        indexes = [make_index(life) for life in lives]
        for index in indexes:
            index.add([key(1)], 2, [1])
            told(index)
        assert shows(indexes[0], 1, [replica(life, 2, 1) for life in lives[1:]])
        assert indexes[0].lacking([(key(1), 2, 1)]) == []

    def test_a_sweep_meets_every_block_and_says_which_are_this_hosts(self, make_index: MakeIndex) -> None:
        alice, bob = make_index(ALICE), make_index(BOB)
        alice.add([key(number) for number in range(1000)], 3, [7] * 1000)
        told(alice)
        bob.add([key(number) for number in range(900, 1100)], 2, [9] * 200)
        told(bob)
        parts = list(bob.sweep(trim=True))
        assert {entry for part in parts for entry in part.mine} == {(key(number), 2, 9) for number in range(900, 1100)}
        assert sum(part.keys for part in parts) >= 1100
        assert not any(part.dead or part.partly or part.changed for part in parts)
        assert shows(alice, 950, [replica(ALICE, 3, 7), replica(BOB, 2, 9)])

    def test_closing_twice_is_fine(self, make_index: MakeIndex) -> None:
        index = make_index(ALICE)
        index.close()
        index.close()

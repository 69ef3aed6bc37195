"""Who the masters are, from what servers say."""

from __future__ import annotations

import pytest
from redis import RedisError

from kvtier.index.address import RedisAddress
from kvtier.index.find import ALONE, NOBODY, SLOTS, ByCluster, Layout, finder
from kvtier.index.shards import Shards


class Server:
    def __init__(self, answer):
        self.answer = answer
        self.asked = 0

    def execute_command(self, _command):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self):
        self.closed = True


@pytest.fixture
def cluster():
    """Makes a finder whose servers answer as given."""

    def make(**servers):
        found = ByCluster(RedisAddress("redis+cluster://" + ",".join(f"{name}:1" for name in servers)), 1.0)
        found._clients = {(name, 1): Server(answer) for name, answer in servers.items()}
        return found

    return make


SAID = [[0, 99, [b"a", 1, b"id"], [b"r", 1, b"id"]], [100, SLOTS - 1, [b"b", 1, b"id"]]]


def test_a_single_server_is_always_the_same():
    assert finder(RedisAddress("redis://host"), 1.0).find() == ALONE
    assert ALONE.of(b"any") == 0


def test_masters_and_their_slots_are_as_the_cluster_says(cluster):
    layout = cluster(a=SAID).find()
    assert layout.masters == (("a", 1), ("b", 1))
    assert layout.slots[0] == layout.slots[99] == 0
    assert layout.slots[100] == layout.slots[-1] == 1


def test_slots_that_nobody_serves_are_known(cluster):
    layout = cluster(a=[[0, 1, [b"", 1, b"id"]]]).find()
    assert layout.masters == (("a", 1),)  # an empty host is the one that was asked
    assert layout.slots[2] == NOBODY


def test_who_does_not_answer_is_left_alone_and_who_does_is_not_believed_for_ever(cluster):
    found = cluster(a=RedisError("down"), b=SAID)
    down, well = found._clients.values()
    for _ in range(5):
        found.find()
    assert (down.asked, well.asked) == (1, 5)
    for _ in range(5):
        found.find()
    assert (down.asked, well.asked) == (2, 10)


def test_nobody_answers(cluster):
    with pytest.raises(RedisError, match="no server of the Cluster"):
        cluster(a=RedisError("down"), b=OSError("away")).find()
    with pytest.raises(RedisError):
        cluster(a=[]).find()


def test_shards_keep_what_stays_and_close_what_goes():
    made = []

    def make(where):
        made.append(Server(where))
        return made[-1]

    shards = Shards(make, Layout((("a", 1), ("b", 1)), tuple(slot % 2 for slot in range(SLOTS))))
    before = shards.now[1]
    shards.take(Layout((("b", 1), ("c", 1)), tuple(slot % 2 for slot in range(SLOTS))))
    assert shards.now[1] == (before[1], made[2])
    assert before[0].closed
    shards.take(Layout((("c", 1),), (NOBODY,) * SLOTS))
    with pytest.raises(RedisError, match="no master"):
        shards.of(b"key")

"""A clock that is set by hand, and a Redis that counts and fails on request."""

from __future__ import annotations

import msgspec
from redis import TimeoutError as RedisTimeoutError

from kvtier.index.find import ALONE
from kvtier.index.masters import Masters, sha
from kvtier.index.tell import TELL, Told


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeLookups:
    """Answers lookups from `values`.

    Attributes:
        down: whether every call times out, on this clock.
        calls: what was called, in order, but for opening connections.
    """

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock
        self.down = self.misplaced = False
        self.calls: list[str] = []
        self.values: dict[bytes, bytes] = {}

    def get(self, keys):
        self._called("get")
        return [self.values.get(key) for key in keys]

    def ping(self):
        self._called("ping")

    def open(self):
        pass

    def take(self, layout):
        pass

    def close(self):
        pass

    def _called(self, name):
        self.calls.append(name)
        if self.down:
            self.clock.now += 0.02
            raise RedisTimeoutError("timed out")


class FakeRedis:
    """Takes batches, and shows the node table.

    Attributes:
        down: whether every call times out.
        calls: names of the commands, in order.
        batches: updates of each batch told.
        table: node table, as the field and the record's members.
    """

    def __init__(self) -> None:
        self.down = False
        self.calls: list[str] = []
        self.batches: list[dict[bytes, bytes]] = []
        self.table: dict[int, dict[str, object]] = {}
        self.answer = Told.WELL

    def masters(self):
        return Masters(lambda where: self, ALONE)

    def hdel(self, _name, field):
        self._called("hdel")
        self.table.pop(int(field), None)

    def evalsha(self, name, count, *rest):
        assert name == sha(TELL)
        self._called("evalsha")
        keys, args = rest[:count], rest[count:]
        self.batches.append(dict(zip(keys[1:], args[7:], strict=True)))
        self.table[args[0]] = {"incarnation": args[1], "host": args[2], "door": args[3], "at": 50, "told": args[4]}
        return int(self.answer)

    def pipeline(self, *, transaction):
        assert not transaction
        return self

    def time(self):
        pass

    def hgetall(self, _name):
        pass

    def execute(self):
        self._called("nodes")
        return (50, 0), {str(node).encode(): msgspec.json.encode(record) for node, record in self.table.items()}

    def close(self):
        pass

    def _called(self, name):
        self.calls.append(name)
        if self.down:
            raise RedisTimeoutError("timed out")

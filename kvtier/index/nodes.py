"""The node table in Redis: one hash, a JSON record a host.

Records carry the time of Redis, never a host's own, so that ages agree across hosts whose clocks do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import cast

import msgspec
from redis import Redis

from kvtier.index.base import Life, Node
from kvtier.index.masters import run

NODES = b"kvtier:nodes"

REGISTER = """
-- Give a host its number and its next incarnation. KEYS: node table. ARGV: host, door, number to try first.
local now = tonumber(redis.call('TIME')[1])
local table_ = redis.call('HGETALL', KEYS[1])
local taken, node, last = {}, nil, 0
for i = 1, #table_, 2 do
  local record = cjson.decode(table_[i + 1])
  taken[tonumber(table_[i])] = true
  if record.host == ARGV[1] then node, last = tonumber(table_[i]), record.incarnation end
end
if not node then
  local try = tonumber(ARGV[3])
  for _ = 1, 65535 do
    if not taken[try] then node = try; break end
    try = try % 65535 + 1
  end
  if not node then return redis.error_reply('all 65535 node numbers are taken') end
end
local incarnation = math.max(last + 1, now)
redis.call('HSET', KEYS[1], node, cjson.encode(
  {incarnation = incarnation, host = ARGV[1], door = ARGV[2], at = now, told = 0}))
return {node, incarnation}
"""

LEAVE = """
-- Say of a node that nothing was heard of it for as long as there is time; it keeps its number, and its next life is
-- a later one. KEYS: node table. ARGV: node, incarnation. Answers 1 if it is of this life.
local text = redis.call('HGET', KEYS[1], ARGV[1])
if not text then return 0 end
local record = cjson.decode(text)
if record.incarnation ~= tonumber(ARGV[2]) then return 0 end
record.at = 0
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(record))
return 1
"""

BURY = """
-- Say of a node that was silent for long that it was told nothing. KEYS: node table. ARGV: node, seconds.
-- Answers 1 if it was.
local text = redis.call('HGET', KEYS[1], ARGV[1])
if not text then return 0 end
local record = cjson.decode(text)
if tonumber(redis.call('TIME')[1]) - record.at < tonumber(ARGV[2]) then return 0 end
record.told = -1
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(record))
return 1
"""

ERASE = """
-- Take a buried node out of the table, if it was not heard of since. KEYS: node table. ARGV: node. Answers 1 if so.
local text = redis.call('HGET', KEYS[1], ARGV[1])
if not text or cjson.decode(text).told >= 0 then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""


class Record(msgspec.Struct, frozen=True):
    """One host's record, written by the scripts.

    Attributes:
        incarnation: its current life.
        host: its name.
        door: where other hosts reach it.
        at: time of its last batch or heartbeat, seconds, by Redis's clock.
        told: number of its last batch; -1 when it was buried, see `kvtier.index.sweep`.
    """

    incarnation: int
    host: str
    door: str
    at: int
    told: int


def preferred_number(host: str) -> int:
    """Node number that this host gets unless another has it: it depends on the name alone."""
    return int.from_bytes(hashlib.sha256(host.encode()).digest()[:4], "little") % 65535 + 1


def register(client: Redis, host: str, door: str) -> Life:
    """Give `host` its node number and a new incarnation, atomically; its older life is dead from now on.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    node, incarnation = run(client, REGISTER, [NODES], [host, door, preferred_number(host)])
    return Life(int(node), int(incarnation), host, door)


def read_nodes(client: Redis, dead_after: float) -> dict[int, Node]:
    """Read the node table; a host is alive when its record is younger than `dead_after` seconds.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    pipe = client.pipeline(transaction=False)
    pipe.time()
    pipe.hgetall(NODES)
    (seconds, micros), records = cast("tuple[tuple[int, int], Mapping[bytes, bytes]]", pipe.execute())
    nodes = {}
    for field, text in records.items():
        try:
            node, record = int(field), msgspec.json.decode(text, type=Record)
        except (ValueError, msgspec.MsgspecError):
            continue
        age = max(0.0, seconds + micros / 1e6 - record.at)
        nodes[node] = Node(node, record.incarnation, record.host, record.door, age, age < dead_after)
    return nodes

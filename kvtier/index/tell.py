"""One batch of a host's updates, applied in Redis by one script."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from redis import Redis

from kvtier.index.base import MAX_REPLICAS, Life
from kvtier.index.entry import ENTRY, OWNER, VERSION, pack_owner
from kvtier.index.nodes import NODES

TELL = f"""
-- KEYS: node table, then blocks. ARGV: node, incarnation, host, door, number of this batch, number last confirmed,
-- owner bytes, then for each block the body of its entry, or nothing to discard it.
-- Answers 0 when all is well, 1 when Redis lost earlier batches, 2 when the host is someone else's now.
local nodes, incarnation, owner = KEYS[1], tonumber(ARGV[2]), ARGV[7]
local sub = string.sub
local lost = 1
local text = redis.call('HGET', nodes, ARGV[1])
if text then
  local was = cjson.decode(text)
  if was.host ~= ARGV[3] or was.incarnation > incarnation then return 2 end
  if was.incarnation == incarnation and was.told >= tonumber(ARGV[6]) then lost = 0 end
end
redis.call('HSET', nodes, ARGV[1], cjson.encode({{incarnation = incarnation, host = ARGV[3], door = ARGV[4],
  at = tonumber(redis.call('TIME')[1]), told = tonumber(ARGV[5])}}))

local current = {{[sub(owner, 1, 2)] = owner}}
local function alive(other)
  local number = sub(other, 1, 2)
  if current[number] == nil then
    local record = redis.call('HGET', nodes, (struct.unpack('<H', number)))
    current[number] = record and struct.pack('<HI4', struct.unpack('<H', number), cjson.decode(record).incarnation)
  end
  return current[number] == other
end

local front = string.char({VERSION})
for i = 2, #KEYS do
  local value, body = redis.call('GET', KEYS[i]), ARGV[i + 6]
  local kept = {{}}
  if value and sub(value, 1, 1) == front then
    for at = 2, #value, {ENTRY.size} do
      local other = sub(value, at, at + {OWNER.size - 1})
      if sub(other, 1, 2) ~= sub(owner, 1, 2) and alive(other) then
        kept[#kept + 1] = sub(value, at, at + {ENTRY.size - 1})
      end
    end
  end
  if body ~= '' then
    if #kept >= {MAX_REPLICAS} then table.remove(kept, 1) end
    kept[#kept + 1] = owner .. body
  end
  if #kept > 0 then
    redis.call('SET', KEYS[i], front .. table.concat(kept))
  elseif value then
    redis.call('DEL', KEYS[i])
  end
end
return lost
"""


class Told(IntEnum):
    """What became of a batch."""

    WELL = 0
    LOST = 1
    """Applied, but Redis no longer has what was told before."""
    SUPERSEDED = 2
    """Refused: the host's record is a later life's, or another host's."""


class Teller:
    """Tells batches for one life of one host; not thread-safe.

    Attributes:
        life: who tells.
        confirmed: number of the last batch that Redis confirmed; 0 before the first.
    """

    def __init__(self, client: Redis, life: Life) -> None:
        """Take the connection for updates, and who tells."""
        self.life = life
        self.confirmed = 0
        self._owner = pack_owner(life)
        self._number = 0
        self._script = client.register_script(TELL)

    def tell(self, updates: Mapping[bytes, bytes]) -> Told:
        """Apply these updates (key -> body, or nothing to discard) in one round trip; without any, a heartbeat.

        Raises:
            redis.RedisError: Redis does not answer; whether the batch was applied is unknown, repeating it is harmless.
        """
        self._number += 1
        life = self.life
        who: list[bytes | str | int] = [life.node, life.incarnation, life.host, life.door]
        who += [self._number, self.confirmed, self._owner]
        told = Told(int(self._script(keys=[NODES, *updates], args=[*who, *updates.values()])))
        if told is not Told.SUPERSEDED:
            self.confirmed = self._number
        return told

"""One batch of a host's updates, applied in Redis.

A single master takes a batch in one script, all or nothing. A Cluster takes no script whose keys are of several slots:
there each key has a small script of its own, and each master a *witness*, told last of a batch. A master that was
emptied, or replaced by a replica that lags, lacks the witness of what it lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from redis import RedisError
from redis.exceptions import AskError

from kvtier.index.base import MAX_REPLICAS, Life
from kvtier.index.entry import ENTRY, OWNER, VERSION, pack_owner
from kvtier.index.masters import Command, Masters, run, sha
from kvtier.index.nodes import NODES

STORE = f"""
local front = string.char({VERSION})
-- Write a block's other entries, and this owner's behind them if there is one.
local function store(key, value, kept, body)
  if body ~= '' then
    if #kept >= {MAX_REPLICAS} then table.remove(kept, 1) end
    kept[#kept + 1] = owner .. body
  end
  if #kept > 0 then
    redis.call('SET', key, front .. table.concat(kept))
  elseif value then
    redis.call('DEL', key)
  end
end
"""

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

{STORE}
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
  store(KEYS[i], value, kept, body)
end
return lost
"""


MERGE = f"""
-- KEYS: a block. ARGV: owner bytes, body of its entry or nothing to discard it.
-- Entries of other hosts stay, dead or alive: who lives is written at another master. So does a later life's own.
local owner, body, sub = ARGV[1], ARGV[2], string.sub
local value = redis.call('GET', KEYS[1])
{STORE}
local kept = {{}}
if value and sub(value, 1, 1) == front then
  for at = 2, #value, {ENTRY.size} do
    local other = sub(value, at, at + {OWNER.size - 1})
    if sub(other, 1, 2) ~= sub(owner, 1, 2) then
      kept[#kept + 1] = sub(value, at, at + {ENTRY.size - 1})
    elseif struct.unpack('<I4', sub(other, 3)) > struct.unpack('<I4', sub(owner, 3)) then
      return 0
    end
  end
end
store(KEYS[1], value, kept, body)
return 0
"""

WITNESS = """
-- KEYS: a master's witness. ARGV: node, incarnation, number of this batch, number last confirmed. Answers as TELL does.
local was, lost, incarnation = redis.call('HGET', KEYS[1], ARGV[1]), 1, tonumber(ARGV[2])
if was then
  local life, told = string.match(was, '^(%d+) (%d+)$')
  if tonumber(life) > incarnation then return 2 end
  if tonumber(life) == incarnation and tonumber(told) >= tonumber(ARGV[4]) then lost = 0 end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
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

    def __init__(self, masters: Masters, life: Life) -> None:
        """Take whom to tell, and who tells."""
        self.life = life
        self.confirmed = 0
        self._masters = masters
        self._owner = pack_owner(life)
        self._number = 0

    def tell(self, updates: Mapping[bytes, bytes]) -> Told:
        """Apply these updates (key -> body, or nothing to discard) in one round trip; without any, a heartbeat.

        Raises:
            redis.RedisError: Redis does not answer; whether the batch was applied is unknown, repeating it is harmless.
        """
        self._number += 1
        told = self._spread(updates) if self._masters.spread else self._together(updates)
        if told is not Told.SUPERSEDED:
            self.confirmed = self._number
        return told

    def _together(self, updates: Mapping[bytes, bytes]) -> Told:
        keys = [NODES, *updates]
        return Told(int(run(self._masters.of(NODES), TELL, keys, [*self._who(), *updates.values()])))

    def _spread(self, updates: Mapping[bytes, bytes]) -> Told:
        masters, keys = self._masters, list(updates)
        life, home = self.life, masters.split([NODES])
        commands: dict[int, list[Command]] = {number: [] for number in range(len(masters.all))}
        for number, places in masters.split(keys).items():
            for key in map(keys.__getitem__, places):
                commands[number].append(script(MERGE, key, [self._owner, updates[key]]))
        for number, mine in commands.items():
            numbers = [life.node, life.incarnation, self._number, self.confirmed]
            mine.append(script(WITNESS, witness(masters.tag(number)), numbers))
        for number in home:
            commands[number].append(script(TELL, NODES, self._who()))
        answers = masters.exchange(commands, SCRIPTS)
        worst = Told.WELL
        for number, mine in commands.items():
            for command, answer in zip(mine, answers[number], strict=True):
                worst = max(worst, Told(int(self._settled(command, answer))))
        return worst

    def _settled(self, command: Command, answer: Any) -> Any:
        """The answer, after a slot that is on its way to another master was followed there."""
        if type(answer) is AskError:
            answer = self._masters.follow(answer, [b"EVAL", TEXTS[command[1]], *command[2:]])
        if isinstance(answer, Exception):
            raise answer if isinstance(answer, RedisError) else RedisError(str(answer))
        return answer

    def _who(self) -> list[bytes | str | int]:
        life = self.life
        return [life.node, life.incarnation, life.host, life.door, self._number, self.confirmed, self._owner]


SCRIPTS = (TELL, MERGE, WITNESS)
TEXTS = {sha(text).encode(): text.encode() for text in SCRIPTS}


def witness(tag: str) -> bytes:
    """Key in which a master remembers what it was told."""
    return b"kvtier:told:{%s}" % tag.encode()


def script(text: str, key: bytes, arguments: Iterable[bytes | str | int]) -> Command:
    """A script with one key, as a command."""
    values = [value if isinstance(value, bytes) else str(value).encode() for value in arguments]
    return [b"EVALSHA", sha(text).encode(), b"1", key, *values]

"""The masters as the background uses them: patiently, script by script."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

from redis import Redis, RedisError, ResponseError
from redis.exceptions import AskError, NoScriptError

from kvtier.index.address import Where
from kvtier.index.find import NOBODY, Layout
from kvtier.index.lookups import packed, split
from kvtier.index.ready import Line
from kvtier.index.shards import Shards

Command = Sequence[bytes]
"""Its name and arguments."""


class Masters:
    """Clients of all masters; not thread-safe but for `close`."""

    def __init__(self, client: Callable[[Where], Redis], layout: Layout) -> None:
        """Take what makes a client of a master, and where the masters are."""
        self._client = client
        self._clients = Shards(client, layout)

    @property
    def spread(self) -> bool:
        """Whether keys are spread over several masters, none of which takes a command for all of them."""
        return self._clients.now[0].slots is not None

    @property
    def all(self) -> tuple[Redis, ...]:
        """A client of each."""
        return self._clients.now[1]

    def take(self, layout: Layout) -> None:
        """From now on the masters are these."""
        self._clients.take(layout)

    def of(self, key: bytes) -> Redis:
        """Client of the master that has a key.

        Raises:
            redis.RedisError: nobody has it now.
        """
        return self._clients.of(key)

    def run(self, script: str, key: bytes, arguments: Iterable[bytes | str | int]) -> Any:
        """Run a script at the master that has this key, its only one."""
        return run(self.of(key), script, [key], arguments)

    def split(self, keys: Sequence[bytes]) -> dict[int, list[int]]:
        """Places of the keys by the number of their master.

        Raises:
            redis.RedisError: nobody has one of them now.
        """
        layout = self._clients.now[0]
        parts = {0: list(range(len(keys)))} if layout.slots is None else split(layout, keys)
        if NOBODY in parts or not layout.masters:
            raise RedisError("no master has some of the keys now")
        return parts

    def tag(self, number: int) -> str:
        """A word whose slot this master has."""
        layout = self._clients.now[0]
        return next(word for word in map(str, range(1 << 20)) if layout.of(word.encode()) == number)

    def exchange(self, commands: dict[int, list[Command]], scripts: Sequence[str] = ()) -> dict[int, list[Any]]:
        """Send each master its commands in one write, then read all answers; errors of the server are answers.

        Commands may call these scripts by their names: a master that does not know them is told, and asked again.

        Raises:
            redis.RedisError: one does not answer; whether its commands were done is unknown.
        """
        answers = self._exchange(commands)
        ignorant = [n for n, some in answers.items() if any(isinstance(answer, NoScriptError) for answer in some)]
        if not ignorant:
            return answers
        for number in ignorant:
            for text in scripts:
                self.all[number].script_load(text)
        return self._exchange(commands)

    def follow(self, moved: AskError, command: Command) -> Any:
        """Give a command to the master that an answer of another one named.

        Raises:
            redis.RedisError: it does not take it.
        """
        client = self._client((moved.host, moved.port))
        try:
            with _lent(client) as connection:
                connection.send_packed_command([*packed(b"ASKING", ()), *packed(command[0], command[1:])])
                _read(connection)
                return _read(connection)
        finally:
            client.close()

    def close(self) -> None:
        """Drop all connections."""
        self._clients.close()

    def _exchange(self, commands: dict[int, list[Command]]) -> dict[int, list[Any]]:
        clients = self.all
        with ExitStack() as stack:
            lent = {number: stack.enter_context(_lent(clients[number])) for number in commands}
            for number, connection in lent.items():
                connection.send_packed_command(
                    [b"".join([piece for c in commands[number] for piece in packed(c[0], c[1:])])]
                )
            return {number: [_read(connection) for _ in commands[number]] for number, connection in lent.items()}


def run(client: Redis, script: str, keys: Sequence[bytes], arguments: Iterable[bytes | str | int]) -> Any:
    """Run a script; by its name, where the server knows it."""
    values = list(arguments)
    try:
        return client.evalsha(sha(script), len(keys), *keys, *values)
    except NoScriptError:
        return client.eval(script, len(keys), *keys, *values)


@cache
def sha(script: str) -> str:
    """Name of a script."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


@contextmanager
def _lent(client: Redis) -> Iterator[Line]:
    connection = cast("Line", client.connection_pool.get_connection())
    try:
        yield connection
    except BaseException:
        connection.disconnect()
        raise
    finally:
        client.connection_pool.release(cast("Any", connection))


def _read(connection: Line) -> Any:
    try:
        return connection.read_response()
    except ResponseError as exc:
        return exc

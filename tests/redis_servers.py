"""Real Redis servers in every shape: alone, watched by a Sentinel, as a Cluster, with TLS and a user of few rights."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry

from kvtier.testing.index import eventually
from kvtier_services.redis_server import find_binary

ACL = (
    "resetchannels ~* -@all +ping +select +get +mget +set +del +hget +hset +hdel +hgetall +time +scan "
    "+eval +evalsha +script|load +cluster|slots"
)
"""What kvtier's user needs; docs/redis.md has the same line."""


@dataclass(slots=True)
class Server:
    """One server process on loopback."""

    port: int
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def where(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def client(self, **options: object) -> Redis:
        return Redis(port=self.port, socket_timeout=5, protocol=2, retry=Retry(NoBackoff(), 0), **options)

    def ask(self, *command: object) -> object:
        with self.client() as client:
            return client.execute_command(*command)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(10)


@contextmanager
def fleet() -> Iterator[Fleet]:
    """Start servers, and end them."""
    with tempfile.TemporaryDirectory(prefix="kvt") as folder, ExitStack() as stack:
        yield Fleet(Path(folder), stack)


@dataclass(slots=True)
class Fleet:
    """Servers of one test."""

    folder: Path
    stack: ExitStack

    def server(self, *lines: str, sentinel: bool = False, wait: bool = True) -> Server:
        """One more, with these lines in its configuration."""
        port = free_port()
        folder = self.folder / str(port)
        folder.mkdir()
        own = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", "daemonize no"]
        own += [] if sentinel else ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
        (folder / "conf").write_text("\n".join([*own, *lines]) + "\n")
        command = [str(find_binary()), str(folder / "conf"), *(["--sentinel"] if sentinel else [])]
        server = Server(port, command)
        server.start()
        self.stack.callback(server.kill)
        assert not wait or eventually(lambda: answers(server)), f"{command} does not answer"
        return server

    def tls_port(self, *lines: str) -> int | None:
        """Port of TLS of one more server; None where the binary was built without."""
        port = free_port()
        server = self.server(f"tls-port {port}", *lines, wait=False)
        if eventually(lambda: server.process.poll() is not None or answers(server)):
            return port if server.process.poll() is None else None
        raise AssertionError(f"{server.command} does not answer")

    def sentinel(self, master: Server) -> Server:
        """A Sentinel that watches a master and its replicas, and acts alone."""
        return self.server(
            f"sentinel monitor main 127.0.0.1 {master.port} 1",
            "sentinel down-after-milliseconds main 300",
            "sentinel failover-timeout main 3000",
            sentinel=True,
        )

    def cluster(self, masters: int = 3, *lines: str) -> list[Server]:
        """A Cluster of masters."""
        own = ("cluster-enabled yes", "cluster-node-timeout 500", "cluster-config-file nodes.conf", *lines)
        servers = [self.server(*own) for _ in range(masters)]
        for number, server in enumerate(servers):
            first, last = 16384 * number // masters, 16384 * (number + 1) // masters
            server.ask("CLUSTER", "ADDSLOTS", *range(first, last))
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            server.ask("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        assert eventually(lambda: all(whole(server, masters) for server in servers))
        return servers

    def replica(self, masters: Sequence[Server], *lines: str) -> Server:
        """One more server of a Cluster, that follows the first of its masters, and that all of them would vote for."""
        own = ("cluster-enabled yes", "cluster-node-timeout 500", "cluster-config-file nodes.conf", *lines)
        server = self.server(*own)
        server.ask("CLUSTER", "MEET", "127.0.0.1", masters[0].port)
        name, own_name = (one.ask("CLUSTER", "MYID").decode() for one in (masters[0], server))
        assert eventually(lambda: name in str(server.ask("CLUSTER", "NODES")))
        server.ask("CLUSTER", "REPLICATE", name)
        assert eventually(lambda: server.client().info("replication").get("master_link_status") == "up")
        # They hear of each other by and by, and who has not heard of it takes no part in its election.
        follows = re.compile(rf"{own_name} \S+ slave {name} .* connected")
        assert eventually(lambda: all(follows.search(_nodes(one)) for one in masters))
        return server


def _nodes(server: Server) -> str:
    said = server.ask("CLUSTER", "NODES")
    return said.decode() if isinstance(said, bytes) else str(said)


def answers(server: Server) -> bool:
    try:
        return bool(server.ask("PING"))
    except AuthenticationError:
        return True
    except RedisError:
        return False


def whole(server: Server, masters: int) -> bool:
    said = server.ask("CLUSTER", "INFO")
    text = said.decode() if isinstance(said, bytes) else "\n".join(f"{k}:{v}" for k, v in said.items())
    return "cluster_state:ok" in text and f"cluster_size:{masters}" in text


def free_port() -> int:
    """A port that is free, and whose number plus 10,000, a Cluster's bus, is too."""
    while True:
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError, OverflowError):
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            bus.bind(("127.0.0.1", port + 10_000))
            return port

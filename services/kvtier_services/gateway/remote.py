"""The door for clients of other hosts: gRPC over TCP and TLS for control, Flight for bulk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from platform import node as hostname
from typing import Any

from grpc import aio

from kvtier.config.machine import is_loopback
from kvtier.errors import ConfigError
from kvtier.hierarchy.accounts import Share
from kvtier.hierarchy.cache import Hierarchy
from kvtier.rpc.kvtier_pb2_grpc import add_DoorServicer_to_server
from kvtier.tiers.base import TierNumber
from kvtier_services.gateway import arrow
from kvtier_services.gateway.audit import AuditLog
from kvtier_services.gateway.bulk import BulkServer, Desk
from kvtier_services.gateway.callers import Caller
from kvtier_services.gateway.calls import Calls, Tally
from kvtier_services.gateway.gates import RemoteGate
from kvtier_services.gateway.guests import Guest
from kvtier_services.gateway.register import Register
from kvtier_services.gateway.tls import Certificate, Renewed

_log = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds between looks at the files of tokens and certificates."""
MAX_MESSAGE = 4 << 20
"""Bytes of one message: a match of 100,000 keys."""
CONNECTIONS = 1024
"""That are open at a time; more are refused."""
DRAINING = 5.0
"""Seconds that bulk calls under way may take when the certificate is renewed."""
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_metadata_size", 8192),
    ("grpc.max_concurrent_streams", 128),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS),
    ("grpc.so_reuseport", 0),
    # Who does not even shake hands, and who asks for nothing, is sent away.
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 30_000),
    # A client that is gone without a word has ended within 7 seconds.
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 4000),
    # Of the pings that gRPC sends to measure the path: one that is under way takes the place of those above.
    ("grpc.http2.ping_timeout_ms", 4000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)


@dataclass(frozen=True, slots=True)
class Listen:
    """Where, and with what proof.

    Attributes:
        host: address to listen on.
        port: of the control calls; 0 for any free one.
        bulk_port: of the bulk calls; 0 for any free one.
        certificate: None for plain text.
        insecure: whether plain text may leave this machine.
    """

    host: str
    port: int
    bulk_port: int = 0
    certificate: Certificate | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.certificate is None and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"remote.listen is {self.host}:{self.port}, where tokens and KV would be plain text: set remote.cert "
                "and remote.key, or listen on 127.0.0.1, or write insecure = true"
            )


class RemoteDoor:
    """Control and bulk of one hierarchy for clients of other hosts. Belongs to one asyncio loop.

    Args:
        hierarchy: what is asked.
        listen: where.
        register: who may come in.
        audit: file that admin calls are written to.
        node: the host's name.

    Attributes:
        port, bulk_port: where it listens, once started.
        register: who is known.
    """

    def __init__(
        self, hierarchy: Hierarchy, listen: Listen, register: Register, audit: Path, *, node: str = ""
    ) -> None:
        self._hierarchy, self._listen = hierarchy, listen
        self.register = register
        self._gate = RemoteGate(hierarchy, register, AuditLog(audit))
        self._gate.on_left = self._left
        self._calls = Calls(hierarchy, node or hostname(), self._gate)
        self._desk = Desk(hierarchy, register, self._calls.guests)
        self._renewed: Renewed | None = None
        self._server: aio.Server | None = None
        self._bulk: BulkServer | None = None
        self._looker: asyncio.Task[None] | None = None
        # Of its own: calls may keep all of the loop's threads busy.
        self._watch = ThreadPoolExecutor(1, "kvtier-remote")
        self.port = self.bulk_port = 0

    @property
    def tally(self) -> Tally:
        """What came through."""
        return self._calls.tally

    def status(self) -> dict[str, Any]:
        """Where it listens, what is wrong with its files, and what each tenant has; as plain values."""
        return {
            "address": f"{self._listen.host}:{self.port}",
            "bulk": f"{self._listen.host}:{self.bulk_port}",
            "tls": self._listen.certificate is not None,
            "faults": [fault for fault in (self.register.fault, self._renewed.fault if self._renewed else "") if fault],
            "counters": dict(self._desk.counters),
            "tenants": [tenant.status(self._hierarchy) for tenant in list(self.register.tenants.values())],
        }

    async def start(self) -> None:
        """Open it.

        Raises:
            ConfigError: it cannot listen there, or has no certificate that can be used.
        """
        if not arrow.bounded:
            _log.warning("Arrow was loaded before the door: it has no limit, and clients can make it take all memory")
        certificate = self._listen.certificate
        self._renewed = Renewed(certificate) if certificate is not None else None
        self._bulk = await asyncio.to_thread(self._serve_bulk, self._listen.bulk_port)
        self.bulk_port = self._gate.bulk = self._bulk.port
        server = aio.server(options=OPTIONS)
        add_DoorServicer_to_server(self._calls, server)
        place = f"{self._listen.host}:{self._listen.port}"
        try:
            if self._renewed is None:
                self.port = server.add_insecure_port(place)
            else:
                self.port = server.add_secure_port(place, self._renewed.credentials())
        except RuntimeError as exc:
            await self._end(self._bulk)
            raise ConfigError(f"cannot listen on {place}: {exc}; set remote.listen to an address of this host") from exc
        await server.start()
        self._server = server
        self._hierarchy.writing.append(self._desk.busy)
        self._hierarchy.state.accounts.shares = self._shares
        self._looker = asyncio.create_task(self._look())
        _log.info("remote door open address=%s port=%d bulk=%d", self._listen.host, self.port, self.bulk_port)

    async def stop(self, grace: float = 1.0) -> None:
        """Close it: sessions end at once, calls under way may take `grace` seconds; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        if self._looker is not None:
            self._looker.cancel()
        self._calls.hang_up()
        await server.stop(grace)
        if self._bulk is not None:
            await self._end(self._bulk)
        self._hierarchy.writing.remove(self._desk.busy)
        self._hierarchy.state.accounts.shares = lambda _: ()
        _log.info("remote door closed address=%s port=%d", self._listen.host, self.port)

    def _shares(self, tier: TierNumber) -> Iterable[Share]:
        """What tenants may take of a tier; of the CPU tier's their calls see to it."""
        tenants = self.register.tenants.values() if tier is TierNumber.NVME else ()
        return [tenant.share(self._hierarchy) for tenant in tenants if tenant.quota.nvme]

    def _left(self, guest: Guest) -> None:
        asyncio.get_running_loop().run_in_executor(self._watch, self._desk.left, guest.session, self.bulk_port)

    def _serve_bulk(self, port: int) -> BulkServer:
        return BulkServer(self._listen.host, port, self._desk, self._renewed.pem if self._renewed else None)

    async def _look(self) -> None:
        """Take over tokens and certificates that were renewed."""
        while True:
            await asyncio.sleep(LOOK)
            for look in (self._look_at_tokens, self._thin_out, self._look_at_certificate):
                try:
                    await look()
                except Exception:  # noqa: BLE001 - whatever fails here, tokens that were revoked must end
                    _log.exception("%s failed", look.__name__)

    async def _look_at_tokens(self) -> None:
        if await asyncio.get_running_loop().run_in_executor(self._watch, self.register.refresh):
            self._calls.hang_up(self._unknown)

    async def _thin_out(self) -> None:
        await asyncio.to_thread(self._desk.thin_out, self.bulk_port, CONNECTIONS)

    async def _look_at_certificate(self) -> None:
        if self._renewed is not None and await asyncio.to_thread(self._renewed.refresh):
            await self._renew()

    def _unknown(self, caller: Caller) -> bool:
        return not self.register.knows(caller)

    async def _renew(self) -> None:
        """Serve bulk with the new certificate: Flight reads one only when it begins. The port stays the same."""
        old, self._bulk = self._bulk, None
        ending = asyncio.create_task(self._end(old)) if old is not None else None
        self._bulk = await _until_it_works(lambda: asyncio.to_thread(self._serve_bulk, self.bulk_port))
        if ending is not None:
            await ending
        _log.info("certificate renewed")

    async def _end(self, bulk: BulkServer) -> None:
        """Let the calls under way end, and cut off those that do not."""
        closing = asyncio.create_task(asyncio.to_thread(bulk.shutdown))
        done, _ = await asyncio.wait({closing}, timeout=DRAINING)
        if not done:
            self._desk.cut(self.bulk_port)
            await asyncio.wait({closing}, timeout=DRAINING)


async def _until_it_works(make: Callable[[], Awaitable[BulkServer]]) -> BulkServer:
    """Listen again on a port that is just being given up."""
    deadline = asyncio.get_running_loop().time() + 2 * DRAINING
    while True:
        with suppress(ConfigError):
            return await make()
        if asyncio.get_running_loop().time() > deadline:
            return await make()
        await asyncio.sleep(0.05)

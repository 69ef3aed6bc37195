"""How fast do blocks come from another host?

`peer.vs_tcp.*`: payloads out of another process's arena into slots of this one, over loopback, each verified, against a
plain TCP socket that carries as many bytes in one piece and verifies nothing, in the same second. Payloads of 2 MiB, or
of 256 KiB in figures that say so. The variants carry the same payloads, verified too: `.streams.N` over up to N sockets
(the plain name is what the peer tier does by itself), `.flight.N` over N Arrow Flight streams, `.grpc` over a gRPC
stream of bytes, `.tls` over one TLS socket of the peer tier.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import trustme
from pyarrow import flight

from benchmarks._harness import Figure, emit, options, paired
from kvtier.block import slot_nbytes, verify_payload
from kvtier.index.base import Node, Replica
from kvtier.memory.arena import Arena
from kvtier.peers.fetcher import FetchLimits
from kvtier.peers.server import PeerServer
from kvtier.peers.tier import PeerTier
from kvtier.peers.tls import TlsFiles
from kvtier.testing.payloads import key_of, payload_of
from kvtier.testing.shelf import Shelf
from kvtier.tiers.base import Slots, TierNumber

MIB = 1 << 20
SECRET = b"a benchmark's secret"
SIZES = {"": 2 * MIB, ".256KiB": MIB // 4}
ASK = struct.Struct("<QQ")


def main() -> None:
    args = options(__doc__)
    emit(figures(smoke=args.smoke), as_json=args.json)


def figures(*, smoke: bool) -> Iterator[Figure]:
    totals = (2,) if smoke else (2, 8, 32, 64)
    for suffix, nbytes in SIZES.items():
        with closing(Ends(nbytes, max(totals) * MIB // nbytes)) as ends:
            for total in totals:
                yield from ends.figures(total, suffix, rounds=2 if smoke else 15)


class Ends:
    """Both hosts: the other one in a process of its own."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.slot = slot_nbytes(nbytes)
        self.arena = Arena.private(count * self.slot)
        self.arena.memory[:] = 1
        self.keys = [key_of(seed) for seed in range(count)]
        self.offsets = np.arange(count, dtype=np.int64) * self.slot
        self.pool = ThreadPoolExecutor(4)
        self.stack = ExitStack()
        tls = certificate(Path(self.stack.enter_context(tempfile.TemporaryDirectory())))
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, nbytes, count, tls))
        self.process.start()
        self.ports: dict[str, int] = self.pipe.recv()
        self.plain = self.stack.enter_context(socket.create_connection(("127.0.0.1", self.ports["tcp"])))
        self.tiers = {streams: self._tier("peer", streams) for streams in (None, 1, 2, 4)}
        self.tls = self._tier("tls", 1, tls)
        # Without a pool of its own each client would share one connection.
        apart = [("grpc.use_local_subchannel_pool", 1)]
        self.flights = [
            self.stack.enter_context(flight.connect(f"grpc://127.0.0.1:{self.ports['flight']}", generic_options=apart))
            for _ in range(4)
        ]
        channel = grpc.insecure_channel(
            f"127.0.0.1:{self.ports['grpc']}", options=[("grpc.max_receive_message_length", -1)]
        )
        self.stack.callback(channel.close)
        self.stream: Any = channel.unary_stream("/peer/fetch")

    def _tier(self, port: str, streams: int | None, tls: TlsFiles | None = None) -> PeerTier:
        limits = FetchLimits(streams=streams, stream_nbytes=MIB) if streams else None
        tier = self.stack.enter_context(closing(PeerTier(self.arena, "bench", "", SECRET, limits=limits, tls=tls)))
        node = Node(2, 1, "other", f"127.0.0.1:{self.ports[port]}", 0.0, alive=True)
        replicas = [(Replica(2, 1, TierNumber.CPU, self.nbytes),)] * len(self.keys)
        tier.found(self.keys, replicas, {2: node})
        return tier

    def figures(self, total: int, suffix: str, *, rounds: int) -> Iterator[Figure]:
        count = total * MIB // self.nbytes
        work: dict[str, Callable[[], object]] = {
            "": lambda: self.sockets(self.tiers[None], count),
            ".streams.1": lambda: self.sockets(self.tiers[1], count),
            ".streams.2": lambda: self.sockets(self.tiers[2], count),
            ".streams.4": lambda: self.sockets(self.tiers[4], count),
            ".tls": lambda: self.sockets(self.tls, count),
            ".grpc": lambda: self.grpc(count),
        }
        for streams in (1, 2, 4):
            if streams <= count:
                work[f".flight.{streams}"] = lambda streams=streams: self.flight(streams, count)
        for name, one in paired(lambda: self.tcp(total * MIB), work, rounds=rounds).items():
            yield one.figure(
                f"peer.vs_tcp.{total}MiB{suffix}{name}",
                "x of a TCP socket",
                gbps=round(total * MIB / one.seconds / 1e9, 2),
                tcp_gbps=round(total * MIB / one.baseline_seconds / 1e9, 2),
            )

    def tcp(self, total: int) -> None:
        self.plain.sendall(ASK.pack(0, total))
        view, at = memoryview(self.arena.memory.data), 0
        while at < total:
            at += self.plain.recv_into(view[at:total])

    def sockets(self, tier: PeerTier, count: int) -> None:
        slots = Slots(self.offsets[:count], np.full(count, self.nbytes, np.int64))
        assert all(tier.read(self.keys[:count], slots))

    def flight(self, streams: int, count: int) -> None:
        def one(place: int) -> None:
            begin, end = place * count // streams, (place + 1) * count // streams
            reader = self.flights[place].do_get(flight.Ticket(ASK.pack(begin, end)))
            for at, chunk in enumerate(reader, begin):
                self._take(at, chunk.data.column(0).buffers()[2])

        if streams == 1:
            one(0)
        else:
            list(self.pool.map(one, range(streams)))

    def grpc(self, count: int) -> None:
        for at, payload in enumerate(self.stream(ASK.pack(0, count))):
            self._take(at, payload)

    def _take(self, place: int, payload: Any) -> None:
        offset = place * self.slot
        self.arena.memory[offset : offset + self.nbytes] = np.frombuffer(payload, np.uint8)
        verify_payload(self.arena.payload(offset, self.nbytes), expected=self.keys[place])

    def close(self) -> None:
        self.stack.close()
        self.pool.shutdown()
        self.pipe.send(None)
        self.process.join()


def certificate(folder: Path) -> TlsFiles:
    """One for both hosts."""
    authority = trustme.CA()
    made = authority.issue_cert("bench.fleet")
    files = TlsFiles(folder / "cert", folder / "key", folder / "ca")
    made.cert_chain_pems[0].write_to_path(files.cert)
    made.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)
    return files


def serve(pipe: Connection, nbytes: int, count: int, tls: TlsFiles) -> None:
    """Run the other host."""
    arena = Arena.private(count * slot_nbytes(nbytes))
    shelf = Shelf(arena)
    for seed in range(count):
        shelf.put([key_of(seed)], [payload_of(seed, nbytes)])
    with (
        closing(PeerServer(shelf, arena, ("127.0.0.1", 0), SECRET)) as server,
        closing(PeerServer(shelf, arena, ("127.0.0.1", 0), SECRET, tls=tls)) as guarded,
        socket.create_server(("127.0.0.1", 0)) as listener,
        Flights(arena, nbytes) as flights,
    ):
        threading.Thread(target=_tcp, args=(listener, arena), daemon=True).start()
        calls, port = _calls(arena, nbytes)
        ports = {"peer": server.address[1], "tls": guarded.address[1], "tcp": listener.getsockname()[1]}
        pipe.send(ports | {"flight": flights.port, "grpc": port})
        pipe.recv()
        calls.stop(None)


def _tcp(listener: socket.socket, arena: Arena) -> None:
    with listener.accept()[0] as sock:
        while asked := sock.recv(ASK.size):
            sock.sendall(arena.payload(0, ASK.unpack(asked)[1]))


class Flights(flight.FlightServerBase):  # type: ignore[misc]
    """Payloads as rows of one binary column, a batch each, without a copy."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._arena = arena
        self._nbytes = nbytes
        self._schema = pa.schema([("payload", pa.large_binary())])
        self._ends = pa.py_buffer(struct.pack("<qq", 0, nbytes))

    def do_get(self, _context: object, ticket: flight.Ticket) -> Any:
        begin, end = ASK.unpack(ticket.ticket)
        return flight.GeneratorStream(self._schema, (self._batch(place) for place in range(begin, end)))

    def _batch(self, place: int) -> pa.RecordBatch:
        payload = self._arena.payload(place * slot_nbytes(self._nbytes), self._nbytes)
        column = pa.Array.from_buffers(pa.large_binary(), 1, [None, self._ends, pa.py_buffer(payload)])
        return pa.RecordBatch.from_arrays([column], schema=self._schema)


def _calls(arena: Arena, nbytes: int) -> tuple[Any, int]:
    def fetch(asked: bytes, _context: object) -> Iterator[bytes]:
        begin, end = ASK.unpack(asked)
        for place in range(begin, end):
            yield bytes(arena.payload(place * slot_nbytes(nbytes), nbytes))

    server: Any = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_send_message_length", -1)])
    handlers = {"fetch": grpc.unary_stream_rpc_method_handler(fetch)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peer", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


if __name__ == "__main__":
    main()

"""Blocks of other hosts come whole or not at all, whatever happens to these hosts, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import trustme

from kvtier.errors import ConfigError, KVTierError, OverQuota, ProtocolMismatch, Unauthenticated
from kvtier.memory.arena import Arena
from kvtier.peers import handshake, wire
from kvtier.peers.dial import Dialer
from kvtier.peers.fetcher import FetchLimits
from kvtier.peers.gate import GateLimits
from kvtier.peers.server import WINDOW_BLOCKS, PeerServer
from kvtier.peers.tls import Tls, TlsFiles
from kvtier.peers.wire import Kind
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.base import TierNumber
from tests.door_fixture import ROOT, stop
from tests.peer_fixture import LIMITS, SECRET, Far, PeerDesk, far, near, node_at, nothing_left

COUNT, NBYTES = WINDOW_BLOCKS + 88, 5000
"""Two windows."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def arena() -> Arena:
    return Arena.private(16 << 20)


@contextmanager
def child(*args: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another host in a process of its own, and its door."""
    command = [sys.executable, "-m", "tests.peer_child", *map(str, args)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()


@contextmanager
def desk_of(arena: Arena, hosts: Sequence[Far], **options: object) -> Iterator[PeerDesk]:
    with near(arena, **options) as tier:
        yield PeerDesk(tier, arena, hosts=list(hosts))


def eventually(said: Callable[[], bool]) -> bool:
    """Whether it comes true soon: what one end does, the other hears of a little later."""
    until = time.monotonic() + 10
    while not said() and time.monotonic() < until:
        time.sleep(0.01)
    return said()


def counters(desk: PeerDesk) -> dict[str, int]:
    return desk.tier.usage().counters


class TestAHostThatDies:
    def test_killed_in_the_middle(self, arena):
        """What came before is whole, the rest is a miss at once, and nothing is written into its slots afterwards."""
        with child(COUNT, NBYTES, WINDOW_BLOCKS) as (process, door), desk_of(arena, []) as desk:
            desk.find(range(COUNT), NBYTES, [node_at(door)])
            answers: list[bool] = []
            reader = threading.Thread(target=lambda: answers.extend(desk.read(range(COUNT))))
            reader.start()
            assert process.stdout.readline() == "hangs\n"
            began = time.monotonic()
            process.kill()
            reader.join()
            assert time.monotonic() - began < 4
            assert answers == [True] * WINDOW_BLOCKS + [False] * 88
            assert counters(desk) == {
                "fetched": WINDOW_BLOCKS,
                "bytes": WINDOW_BLOCKS * NBYTES,
                "unreachable": 88,
            }

    def test_stopped_in_the_middle(self, arena):
        """It is given up after the stall, and not a byte comes when it goes on."""
        with child(COUNT, NBYTES, WINDOW_BLOCKS) as (process, door), desk_of(arena, []) as desk:
            desk.find(range(COUNT), NBYTES, [node_at(door)])
            began = time.monotonic()
            answers: list[bool] = []
            reader = threading.Thread(target=lambda: answers.extend(desk.read(range(COUNT))))
            reader.start()
            assert process.stdout.readline() == "hangs\n"
            stop(process)
            reader.join()
            assert time.monotonic() - began < 5
            assert answers == [True] * WINDOW_BLOCKS + [False] * 88
            assert counters(desk)["late"] == 88
            before = arena.memory.copy()
            process.send_signal(signal.SIGCONT)
            process.stdin.write("go on\n")
            process.stdin.flush()
            time.sleep(0.2)
            assert np.array_equal(arena.memory, before)

    def test_stopped_before_it_is_asked(self, arena):
        with child(3, NBYTES) as (process, door), desk_of(arena, []) as desk:
            desk.find(range(3), NBYTES, [node_at(door)])
            assert all(desk.read(range(3)))
            stop(process)
            began = time.monotonic()
            assert not any(desk.read(range(3)))
            assert LIMITS.stall * 0.9 < time.monotonic() - began < 4
            began = time.monotonic()
            desk.find(range(3), NBYTES, [node_at(door)])
            assert desk.contains(range(3)) == [False] * 3, "nobody is told to wait for what will not come"
            assert not any(desk.read(range(3)))
            assert time.monotonic() - began < LIMITS.stall * 0.9, "a host that hangs is asked only now and then"
            assert counters(desk)["avoided"] == 3
            assert [each.fault != "" and each.avoided > 0 for each in desk.tier.status()] == [True]

    def test_another_host_has_them_too(self, arena):
        with child(COUNT, NBYTES, WINDOW_BLOCKS) as (process, door), far(3) as other:
            other.put(range(COUNT), NBYTES)
            with desk_of(arena, [other]) as desk:
                desk.find(range(COUNT), NBYTES, [node_at(door), other.node])
                process.kill()
                process.wait()
                assert all(desk.read(range(COUNT)))
                assert counters(desk)["unreachable"] > 0

    def test_in_its_next_life_it_is_asked_at_once(self, arena):
        with desk_of(arena, []) as desk:
            with child(3, NBYTES) as (_, door):
                pass
            desk.find(range(3), NBYTES, [node_at(door)])
            assert not any(desk.read(range(3)))
            with far() as again:
                desk.hosts = [again]
                desk.write(range(3), NBYTES)
                assert all(desk.read(range(3)))


class TestAHostThatLies:
    @pytest.mark.parametrize("byte", [0, 60, 150, NBYTES - 1], ids=["magic", "key", "header", "body"])
    def test_wrong_bytes_are_a_miss_and_come_from_elsewhere(self, arena, byte):
        with far(2) as liar, far(3) as honest, desk_of(arena, [liar, honest]) as desk:
            desk.write([1, 2], NBYTES)
            liar.shelf.arena.memory[[byte, 8192 + byte]] ^= 1
            desk.find([1, 2], NBYTES, [liar.node])
            assert desk.read([1]) == [False]
            assert counters(desk) == {"corrupt": 1}
            assert "not what was stored" in desk.tier.usage().fault
            desk.find([1, 2], NBYTES)
            assert desk.read([1, 2]) == [True, True]

    def test_another_blocks_payload_is_a_miss(self, arena):
        with far() as liar, desk_of(arena, [liar]) as desk:
            liar.shelf.put([key_of(1)], [payload_of(2, NBYTES)])
            desk.find([1], NBYTES)
            assert desk.read([1]) == [False]
            assert counters(desk)["corrupt"] == 1

    @pytest.mark.parametrize(
        "said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 8, b"\xa7" * 4096, bytes(4096)], ids=range(4)
    )
    def test_who_is_no_kvtier_host_is_refused(self, arena, said):
        with socket.create_server(("127.0.0.1", 0)) as listener, desk_of(arena, []) as desk:
            desk.find([1], NBYTES, [node_at("{}:{}".format(*listener.getsockname()))])

            def answer() -> None:
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(said)
                    sock.recv(4096)

            thread = threading.Thread(target=answer)
            thread.start()
            assert desk.read([1]) == [False]
            thread.join()
            assert set(counters(desk)) == {"refused" if said else "unreachable"}

    def test_a_trickle_ends_with_the_deadline(self, arena):
        """A byte before each stall is over would keep a request alive for ever."""
        limits = FetchLimits(seconds=1.0, stall=0.5)
        with child(3, NBYTES) as (_, door), trickling(door) as slow, desk_of(arena, [], limits=limits) as desk:
            desk.find(range(3), NBYTES, [node_at(slow)])
            began = time.monotonic()
            assert not any(desk.read(range(3)))
            assert time.monotonic() - began < 4
            assert set(counters(desk)) == {"late"}


@contextmanager
def trickling(door: str) -> Iterator[str]:
    """A way to a host on which its answers come a few bytes at a time."""
    listener = socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = []

    def carry(source: socket.socket, into: socket.socket, *, slowly: bool) -> None:
        with suppress(OSError):
            while data := source.recv(64 if slowly else 65536):
                into.sendall(data)
                if slowly:
                    time.sleep(0.05)

    def accept() -> None:
        with suppress(OSError):
            client, _ = listener.accept()
            host, port = door.split(":")
            there = socket.create_connection((host, int(port)))
            sockets.extend((client, there))
            for args in ((client, there, False), (there, client, True)):
                threads.append(threading.Thread(target=carry, args=args[:2], kwargs={"slowly": args[2]}))
                threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        for sock in (listener, *sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in threads:
            thread.join()


class TestWhoComesIn:
    def test_only_who_knows_the_secret(self, arena):
        with far(secret=b"of another fleet, alas") as host, desk_of(arena, [host]) as desk:
            desk.write([1], NBYTES)
            assert desk.read([1]) == [False]
            assert counters(desk) == {"refused": 1}
            assert "fleet secret" in desk.tier.usage().fault
            assert host.server.usage().get("blocks", 0) == 0

    def test_a_server_takes_nobody_who_cannot_prove_it(self):
        """Even where the client does not look at the server's proof."""
        with far() as host, socket.create_connection(host.server.address, timeout=2) as sock:
            sock.sendall(handshake.hello("a stranger", os.urandom(32)))
            assert len(sock.recv(4096)) == handshake.CHALLENGE.size
            sock.sendall(os.urandom(handshake.PROOF_NBYTES))
            assert sock.recv(1) == b""
            assert eventually(lambda: host.server.usage().get("strangers") == 1)

    def test_a_proof_counts_once(self):
        """What was said on one connection is worth nothing on another."""
        with far() as host:
            said = handshake.hello("near", os.urandom(32))
            with socket.create_connection(host.server.address, timeout=2) as sock:
                sock.sendall(said)
                proof, _ = handshake.answer(SECRET, said, sock.recv(4096))
                sock.sendall(proof)
                assert sock.recv(4096)
            with socket.create_connection(host.server.address, timeout=2) as sock:
                sock.sendall(said)
                sock.recv(4096)
                sock.sendall(proof)
                assert sock.recv(1) == b""

    def test_frames_need_the_connections_keys(self):
        with far() as host:
            said = handshake.hello("near", os.urandom(32))
            with socket.create_connection(host.server.address, timeout=2) as sock:
                sock.sendall(said)
                sock.sendall(handshake.answer(SECRET, said, sock.recv(4096))[0])
                sock.recv(4096)
                body = wire.fetch(1.0, 0.0, wire.items([key_of(1)], np.array([NBYTES])))
                sock.sendall(wire.head(Kind.FETCH, len(body)) + body + bytes(wire.MAC_NBYTES))
                assert sock.recv(1) == b""
                assert eventually(lambda: host.server.usage().get("broken") == 1)

    def test_another_version_is_told_ours(self, monkeypatch):
        with far() as host:
            dialer = Dialer("near", SECRET, None, time.monotonic, 1.0)
            hello = handshake.hello("near", bytes(32))
            newer = hello[:8] + struct.pack("<H", handshake.VERSION + 1) + hello[10:]
            with socket.create_connection(host.server.address, timeout=2) as sock:
                sock.sendall(newer)
                assert sock.recv(4096) == handshake.refusal()
                assert sock.recv(1) == b""
            monkeypatch.setattr(handshake, "refusal", lambda: newer[:16].ljust(handshake.CHALLENGE.size, b"\0"))
            monkeypatch.setattr(handshake, "hello", lambda *_: newer)
            with pytest.raises(ProtocolMismatch, match="speaks version 2"):
                dialer.dial(host.node.door, time.monotonic() + 2)

    def test_a_secret_that_is_none_is_an_error_at_start(self, arena):
        with pytest.raises(ConfigError, match="secret"), far(secret=b"short"):
            pass
        with pytest.raises(ConfigError, match="secret"), near(arena, secret=b""):
            pass

    def test_a_port_that_is_taken_is_an_error_at_start(self, arena):
        with far() as host, pytest.raises(ConfigError, match="free port"):
            PeerServer(host.shelf, arena, host.server.address, SECRET)

    def test_one_host_takes_only_so_many_connections(self):
        with far(limits=GateLimits(links_each=2, links=3)) as host, ExitStack() as stack:

            def dial(name: str) -> None:
                link = Dialer(name, SECRET, None, time.monotonic, 1.0).dial(host.node.door, time.monotonic() + 2)
                stack.callback(link.close)

            dial("a")
            dial("a")
            with pytest.raises(OverQuota):
                dial("a")
            dial("b")
            assert host.server.usage()["turned_away"] == 1

    def test_who_is_new_takes_the_place_of_a_connection_that_rests(self, arena):
        """In a fleet of hundreds each keeps some to each host: they must not keep the last ones out."""
        with far(limits=GateLimits(links=2)) as host:
            host.put([1], NBYTES)
            begun, lend = threading.Semaphore(0), host.shelf.lend
            host.shelf.lend = lambda *call: begun.release() or lend(*call)
            with ExitStack() as stack:
                limits = FetchLimits(stall=5.0, wait=5.0)
                desks = [stack.enter_context(desk_of(arena, [host], limits=limits)) for _ in range(4)]
                for desk in [*desks, *desks]:
                    desk.find([1], NBYTES)
                    assert desk.read([1]) == [True]
                    assert host.server.usage()["links"] <= 2
                host.shelf.gate.clear()
                busy = [threading.Thread(target=desk.read, args=([1],)) for desk in desks[:2]]
                for desk, thread in zip(desks, busy, strict=False):
                    desk.find([1], NBYTES, tier=TierNumber.NVME)
                    thread.start()
                assert all(begun.acquire(timeout=5.0) for _ in range(10))
                desks[2].find([1], NBYTES)
                assert desks[2].read([1]) == [False], "one that is in use stays"
                assert host.server.usage()["turned_away"] == 1
                host.shelf.gate.set()
                for thread in busy:
                    thread.join()


class TestAFlood:
    def test_of_idle_connections(self, arena):
        """As many as come, few are kept, and a host of the fleet gets in among them."""
        limits = GateLimits(guests=64, hello=30.0)
        with far(limits=limits) as host, desk_of(arena, [host]) as desk:
            desk.write(range(4), NBYTES)
            idle = [socket.create_connection(host.server.address, timeout=5) for _ in range(500)]
            try:
                assert all(desk.read(range(4)))
                assert eventually(lambda: host.server.usage().get("guests_pushed_out", 0) >= 430)
                assert host.server.usage()["guests"] <= 64
            finally:
                for sock in idle:
                    sock.close()

    def test_of_slow_ones(self, arena):
        """Who says hello a byte at a time is gone when the time for it is over."""
        with far(limits=GateLimits(hello=0.5)) as host, desk_of(arena, [host]) as desk:
            desk.write([1], NBYTES)
            with socket.create_connection(host.server.address, timeout=5) as sock:
                with suppress(OSError):
                    for byte in handshake.hello("slow", bytes(32)):
                        sock.sendall(bytes([byte]))
                        time.sleep(0.05)
                        if host.server.usage().get("guests_too_slow"):
                            break
                assert eventually(lambda: host.server.usage().get("guests_too_slow") == 1)
            assert desk.read([1]) == [True]

    def test_of_garbage(self, arena):
        random = np.random.default_rng(5)
        with far() as host, desk_of(arena, [host]) as desk:
            desk.write(range(4), NBYTES)
            for size in random.integers(1, 400, 200).tolist():
                with suppress(OSError), socket.create_connection(host.server.address, timeout=2) as sock:
                    sock.sendall(random.bytes(size))
            assert all(desk.read(range(4)))
            assert eventually(lambda: host.server.usage()["strangers"] > 50)

    def test_of_garbage_by_who_knows_the_secret(self, arena):
        """A host of another mind costs its connection, and no more."""
        random = np.random.default_rng(6)
        with far() as host, desk_of(arena, [host]) as desk:
            desk.write(range(4), NBYTES)
            dialer = Dialer("mad", SECRET, None, time.monotonic, 1.0)
            for _ in range(60):
                until = time.monotonic() + 2
                link = dialer.dial(host.node.door, until)
                body = random.bytes(int(random.integers(0, 300)))
                link.send(Kind(int(random.integers(1, 6))), body, until)
                link.close()
            assert all(desk.read(range(4)))
            assert eventually(lambda: not host.shelf.held)


class Authority:
    """Certificates of one authority, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()

    def files(self, name: str) -> TlsFiles:
        """A host's; written anew each time."""
        files = TlsFiles(*(self.folder / f"{name}.{kind}" for kind in ("crt", "key", "ca")))
        made = self.ca.issue_cert(f"{name}.fleet")
        files.cert.write_bytes(made.cert_chain_pems[0].bytes())
        files.key.write_bytes(made.private_key_pem.bytes())
        self.ca.cert_pem.write_to_path(files.ca)
        return files


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path)

    def test_blocks_come_through_it(self, arena, authority):
        limits = FetchLimits(streams=2, stream_nbytes=1 << 20)
        theirs, ours = authority.files("far"), authority.files("near")
        with far(tls=theirs) as host, desk_of(arena, [host], limits=limits, tls=ours) as desk:
            desk.write(range(40), 200_000)
            for _ in range(3):
                assert all(desk.read(range(40)))
            assert host.server.usage()["links"] <= 2, "connections are used again"

    def test_nobody_comes_in_plainly(self, arena, authority):
        with far(tls=authority.files("far")) as host, desk_of(arena, [host]) as desk:
            desk.write([1], NBYTES)
            assert desk.read([1]) == [False]
            assert set(counters(desk)) <= {"refused", "unreachable"}

    def test_nobody_is_asked_plainly(self, arena, authority):
        with far() as host, desk_of(arena, [host], tls=authority.files("near")) as desk:
            desk.write([1], NBYTES)
            assert desk.read([1]) == [False]
            assert set(counters(desk)) <= {"refused", "unreachable"}

    @pytest.mark.parametrize("stranger", ["far", "near"])
    def test_a_certificate_of_another_authority_is_refused(self, arena, authority, tmp_path, stranger):
        """Also by the server, and also from who knows the secret."""
        (tmp_path / "other").mkdir()
        other = Authority(tmp_path / "other")
        of = {"far": authority, "near": authority, stranger: other}
        near_files = of["near"].files("near")
        near_files.ca.write_bytes(b"".join(each.ca.cert_pem.bytes() for each in (authority, other)))
        if stranger == "far":
            authority.ca.cert_pem.write_to_path(near_files.ca)
        with far(tls=of["far"].files("far")) as host, desk_of(arena, [host], tls=near_files) as desk:
            desk.write([1], NBYTES)
            assert desk.read([1]) == [False]
            assert set(counters(desk)) <= {"refused", "unreachable"}
            assert eventually(lambda: host.server.usage().get("strangers") == 1)
            assert host.server.usage().get("blocks", 0) == 0

    def test_certificates_that_change_are_taken_up_by_new_connections(self, arena, authority, tmp_path):
        """From one authority to the next without a restart, half-written files in between."""
        theirs, ours = authority.files("far"), authority.files("near")
        with far(tls=theirs) as host, desk_of(arena, [host], tls=ours) as desk:
            desk.write([1], NBYTES)
            assert desk.read([1]) == [True]
            theirs.cert.write_bytes(theirs.cert.read_bytes()[:200])
            assert dialled(host, ours), "the last ones that belonged together go on"
            (tmp_path / "next").mkdir()
            following = Authority(tmp_path / "next")
            for name, files in (("far", theirs), ("near", ours)):
                for old, new in zip(paths(files), paths(following.files(name)), strict=True):
                    new.replace(old)
            assert desk.read([1]) == [True], "connections of before go on"
            assert dialled(host, ours)
            assert not dialled(host, Authority(tmp_path).files("old"))

    def test_files_that_cannot_be_used_are_an_error_at_start(self, arena, authority):
        files = authority.files("far")
        files.key.write_text("no key")
        with pytest.raises(ConfigError, match="PEM"), far(tls=files):
            pass
        files.key.unlink()
        with pytest.raises(ConfigError, match=r"far\.key"), near(arena, tls=files):
            pass

    def test_a_flood_of_hellos_that_never_end(self, arena, authority):
        """A TLS handshake that stops in the middle holds nobody up."""
        with far(tls=authority.files("far"), limits=GateLimits(guests=32, hello=30.0)) as host, ExitStack() as stack:
            for _ in range(100):
                sock = stack.enter_context(socket.create_connection(host.server.address, timeout=5))
                sock.sendall(bytes.fromhex("160301020001"))
            with desk_of(arena, [host], tls=authority.files("near")) as desk:
                desk.write([1], NBYTES)
                assert desk.read([1]) == [True]


def paths(files: TlsFiles) -> tuple[Path, Path, Path]:
    return files.cert, files.key, files.ca


def dialled(host: Far, files: TlsFiles) -> bool:
    """Whether a new connection is welcome."""
    try:
        Dialer("new", SECRET, Tls(files), time.monotonic, 1.0).dial(host.node.door, time.monotonic() + 2).close()
    except KVTierError:
        return False
    return True


def test_blocks_that_must_be_brought_up_may_take_a_while(arena):
    with far() as host, desk_of(arena, [host]) as desk:
        host.put([1], NBYTES)
        host.shelf.gate.clear()
        desk.find([1], NBYTES, tier=TierNumber.NVME)
        opens = threading.Timer(0.3, host.shelf.gate.set)
        opens.start()
        assert desk.read([1]) == [True]
        opens.join()
        host.shelf.gate.clear()
        desk.find([1], NBYTES, tier=TierNumber.NVME)
        assert desk.read([1]) == [False]
        assert counters(desk)["absent"] == 1


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "hangs"])
def test_who_asks_and_does_not_listen_holds_no_blocks(arena, leaves):
    """32 MiB are more than a connection takes up by itself."""
    with far(limits=GateLimits(stall=0.5)) as host, desk_of(arena, [host]) as desk:
        host.put(range(16), 2 << 20)
        link = Dialer("deaf", SECRET, None, time.monotonic, 1.0).dial(host.node.door, time.monotonic() + 5)
        blocks = wire.items([key_of(seed) for seed in range(16)], np.full(16, 2 << 20))
        link.send(Kind.FETCH, wire.fetch(30.0, 0.0, blocks), time.monotonic() + 5)
        assert eventually(lambda: bool(host.shelf.held))
        if leaves:
            link.close()
        assert eventually(lambda: not host.shelf.held)
        assert eventually(lambda: host.server.usage().get("left") == 1)
        link.close()
        desk.write([100], NBYTES)
        assert desk.read([100]) == [True]


def test_a_host_that_hangs_takes_no_other_hosts_turn(arena):
    """It had asked on many connections when it stopped; the others are served meanwhile, and so is it later."""
    with far(capacity=128 << 20) as host, desk_of(arena, [host]) as desk, ExitStack() as links:
        host.put(range(16), 2 << 20)
        blocks = wire.items([key_of(seed) for seed in range(16)], np.full(16, 2 << 20))
        dialer = Dialer("deaf", SECRET, None, time.monotonic, 1.0)
        for _ in range(12):
            link = dialer.dial(host.node.door, time.monotonic() + 5)
            links.callback(link.close)
            link.send(Kind.FETCH, wire.fetch(30.0, 0.0, blocks), time.monotonic() + 5)
        assert eventually(lambda: len(host.shelf.held) > 2)
        for seed in range(100, 110):
            desk.write([seed], NBYTES)
            assert desk.read([seed]) == [True]
        assert eventually(lambda: host.server.usage().get("left") == 12), "each had its turn, and did not listen"
        assert not host.shelf.held


def test_what_is_not_there_any_more_is_forgotten_and_the_host_is_not_avoided(arena):
    with far() as host, desk_of(arena, [host]) as desk:
        desk.write([1, 2], NBYTES)
        desk.find([3], NBYTES)
        assert desk.read([1, 3, 2]) == [True, False, True]
        assert desk.contains([1, 2, 3]) == [True, True, False]
        assert counters(desk) == {"fetched": 2, "absent": 1, "bytes": 2 * NBYTES}


def test_large_shares_go_over_several_connections(arena):
    limits = FetchLimits(streams=4, stream_nbytes=1 << 20)
    with far() as host, desk_of(arena, [host], limits=limits) as desk:
        desk.write(range(40), 200_000)
        assert all(desk.read(range(40)))
        links = host.server.usage()["links"]
        assert 2 <= links <= 4
        assert [each.links for each in desk.tier.status()] == [links]
        for _ in range(5):
            assert all(desk.read(range(40)))
        assert host.server.usage()["links"] <= 4, "they are used again"


def test_readers_at_once_never_see_wrong_bytes(arena):
    """More of them than connections."""
    part = arena.capacity // 8
    limits = FetchLimits(links=2, streams=2, stream_nbytes=1 << 16)
    with far(2) as one, far(3) as two, desk_of(arena, [one, two], limits=limits) as desk:
        desk.write(range(64), 20_000)
        errors: list[BaseException] = []

        def work(number: int) -> None:
            mine = PeerDesk(desk.tier, arena, number * part, desk.sizes)
            random = np.random.default_rng(number)
            try:
                for _ in range(25):
                    assert all(mine.read(random.integers(0, 64, 16).tolist()))
            except BaseException as exc:  # noqa: BLE001 - handed to the test's own thread
                errors.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert counters(desk)["fetched"] == 8 * 25 * 16
        assert {each.blocks > 0 for each in desk.tier.status()} == {True}, "both hosts carry their part"
        assert eventually(lambda: not one.shelf.held and not two.shelf.held)


def test_an_offer_reaches_the_other_host(arena):
    with far() as host, near(arena, door="10.1.2.3:7071") as tier:
        host.shelf.interest = 2
        keys, nbytes = [key_of(1), key_of(2), key_of(3)], np.array([5000, 6000, 7000])
        assert tier.offer(host.node, keys, nbytes, time.monotonic() + 2) == 2
        assert host.shelf.offers == [("near", keys, [5000, 6000, 7000], "10.1.2.3:7071")]


def test_who_has_no_door_offers_nothing(arena):
    with far() as host, near(arena) as tier:
        assert tier.offer(host.node, [key_of(1)], np.array([5000]), time.monotonic() + 2) == 0
        assert not host.shelf.offers


def test_an_offer_to_nobody_is_none(arena):
    with far() as host:
        node = host.node
    with near(arena, door="10.1.2.3:7071") as tier:
        assert tier.offer(node, [key_of(1)], np.array([5000]), time.monotonic() + 2) == 0
        assert tier.usage().counters == {"unreachable": 1}


def test_a_name_is_not_looked_up(arena):
    """That has no deadline."""
    with desk_of(arena, []) as desk:
        desk.find([1], NBYTES, [node_at("localhost:7071")])
        assert desk.read([1]) == [False]
        assert counters(desk) == {"unreachable": 1}


def test_a_server_that_closes_lets_go_of_who_is_being_served(arena):
    with far() as host, desk_of(arena, [host], limits=LIMITS) as desk:
        host.put([1], NBYTES)
        host.shelf.gate.clear()
        desk.find([1], NBYTES, tier=TierNumber.NVME)
        answers: list[bool] = []
        reader = threading.Thread(target=lambda: answers.extend(desk.read([1])))
        reader.start()
        while not host.server.usage()["links"]:
            time.sleep(0.01)
        began = time.monotonic()
        host.server.close()
        reader.join()
        assert time.monotonic() - began < 4
        assert answers == [False]
        assert not host.shelf.held


def test_unauthenticated_is_told_apart():
    with far(secret=b"of another fleet, alas") as host, pytest.raises(Unauthenticated):
        Dialer("near", SECRET, None, time.monotonic, 1.0).dial(host.node.door, time.monotonic() + 2)

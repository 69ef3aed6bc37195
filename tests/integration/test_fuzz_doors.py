"""Whatever comes to a host's doors, it stays up and bounded, and nothing gets to whom it does not belong."""

from __future__ import annotations

import random
import resource
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress

import grpc
import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import flight

from kvtier.client.door import DoorSession
from kvtier.errors import SessionError
from kvtier.memory.arena import Arena
from kvtier.rpc import kvtier_pb2 as pb
from kvtier.rpc.bulk import Ask
from kvtier.rpc.channel import OPTIONS
from kvtier.testing.payloads import payload_of
from kvtier.testing.session import CAPACITY, NBYTES, chain, eventually, holds, host_over, reserve, save
from kvtier_services.gateway import tokens
from kvtier_services.gateway.control import writer_gone
from kvtier_services.gateway.remote import CONNECTIONS
from tests.door_fixture import door_in_thread, folders
from tests.remote_fixture import remote_door

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Door"].methods if method.name != "Attach"]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
GROWTH = 96 << 20
"""Bytes that the process may grow by under all this; the largest message is 16 MiB."""


@pytest.fixture
def place():
    with folders() as place:
        yield place


@pytest.fixture
def host(place):
    arena = Arena.own(place[1], CAPACITY)
    with host_over(arena, writer_gone(place[1])) as host:
        yield host
    arena.close()


@pytest.fixture
def remote(host, place, tmp_path):
    with door_in_thread(host.hierarchy, place[0]), remote_door(host.hierarchy, tmp_path) as remote:
        yield remote


@pytest.fixture(params=["socket", "remote"])
def door(request, remote, place):
    """Each door: where raw bytes go, a gRPC target with what proves who calls, and a way to open a session."""
    token = remote.add("kit", admin=True)
    if request.param == "socket":
        return (socket.AF_UNIX, str(place[0])), (f"unix:{place[0]}", ()), lambda: DoorSession(place[0])
    address = ("127.0.0.1", remote.door.port)
    return (socket.AF_INET, address), (remote.url[7:], _bearer(token)), lambda: remote.session(token)


def _bearer(token):
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def unharmed(host, door, remote):
    """A client that was there before goes on, and when the fuzz is over all is as it was."""
    session = door[2]()
    save(session, 0, 3)
    memory = psutil.Process().memory_info().rss
    used = host.hierarchy.state.cpu.pool.used
    yield session
    matched = session.match(chain(0, 3), 1.0)
    assert holds(session, matched, 0)
    session.release(matched.lease)
    assert eventually(lambda: session.status()["leases"] == 0)
    assert eventually(lambda: host.hierarchy.state.cpu.pool.used == used)
    assert eventually(lambda: session.status()["sessions"] == 1)
    assert psutil.Process().memory_info().rss - memory < GROWTH
    session.close()
    desk = remote.door._desk
    assert eventually(lambda: not (+desk._streams or +desk._peers or +desk._writing)), (
        "no bulk call is counted for ever"
    )
    late = door[2]()
    assert holds(late, late.match(chain(0, 3), 1.0), 0)
    late.close()


def frames(dice):
    """HTTP/2 frames of any kind, some with lengths that lie."""
    for _ in range(dice.randrange(1, 20)):
        body = dice.randbytes(dice.randrange(64))
        length = len(body) if dice.random() < 0.7 else dice.randrange(1 << 24)
        kind, flags, stream = dice.randrange(12), dice.randrange(256), dice.randrange(8)
        yield struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, stream) + body


def send(where, data):
    with suppress(OSError), socket.socket(where[0]) as one:
        one.settimeout(0.5)
        one.connect(where[1])
        one.sendall(data)
        one.recv(4096)


def test_bytes_that_are_no_http(door, unharmed):
    dice = random.Random(1)
    for turn in range(200):
        data = dice.randbytes(dice.randrange(1, 3000))
        send(door[0], data if turn % 2 else PREFACE + data)


def test_frames_that_make_no_sense(door, unharmed):
    dice = random.Random(2)
    for _ in range(200):
        send(door[0], PREFACE + b"".join(frames(dice)))


def test_calls_that_make_no_sense(door, unharmed):
    dice, (target, metadata) = random.Random(3), door[1]
    number = unharmed._line._at.session
    with grpc.insecure_channel(target, list(OPTIONS)) as channel:
        for turn in range(300):
            name = dice.choice(METHODS)
            call = channel.unary_unary(f"/kvtier.v1.Door/{name}")
            with suppress(grpc.RpcError):
                call(made_up(dice, name, number if turn % 2 else dice.randrange(4)), timeout=2.0, metadata=metadata)


def made_up(dice, name, session):
    """A request of a real session with any values, or any bytes."""
    if dice.random() < 0.3:
        return dice.randbytes(dice.randrange(200))
    request = getattr(pb, f"{name}Request")(session=session)
    for field in request.DESCRIPTOR.fields:
        # A call waits a moment for notes that it says came before it.
        if field.name == "session" or dice.random() < (0.95 if field.name == "after" else 0.4):
            continue
        if field.type == field.TYPE_BYTES:
            keys = b"".join(chain(dice.randrange(50, 60), dice.randrange(5)))
            value = dice.choice([keys, dice.randbytes(dice.randrange(100)), bytes(34 * 40)])
        elif field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
            value = dice.choice([float("nan"), -1.0, 0.0, 0.01, -float("inf")])
        elif field.type == field.TYPE_BOOL:
            value = dice.random() < 0.5
        else:
            value = dice.choice([0, 1, dice.randrange(1 << 32), (1 << 32) - 1])
        setattr(request, field.name, value)
    if name == "Drop":
        request.keys = b"".join(chain(70, 3))  # not what the test looks for afterwards
        request.space = b""
    return request.SerializeToString()


def test_sessions_that_make_no_sense(door, unharmed):
    dice, (target, metadata) = random.Random(4), door[1]
    with grpc.insecure_channel(target, list(OPTIONS)) as channel:
        attach = channel.stream_stream("/kvtier.v1.Door/Attach")
        for turn in range(100):
            notes = [
                pb.ClientNote(hello=pb.Hello(protocol=dice.choice([0, 2, 3, 99]), client="x" * dice.randrange(10_000)))
            ]
            notes += [pb.ClientNote(join=pb.Join(session=dice.randrange(1 << 32)))] * dice.randrange(3)
            notes += [pb.ClientNote(claim=pb.Claim(keyspace=dice.randbytes(50))), pb.ClientNote()][: dice.randrange(3)]
            said = [note.SerializeToString() for note in notes] if turn % 3 else [dice.randbytes(30) for _ in range(5)]
            with suppress(grpc.RpcError):
                list(attach(iter(said), timeout=2.0, metadata=metadata))


def test_messages_that_are_too_long(door, unharmed):
    target, metadata = door[1]
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(target, options) as channel:
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/kvtier.v1.Door/Match")(bytes(40 << 20), timeout=5.0, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    # A frame that says that a message of 4 GiB follows.
    send(door[0], PREFACE + struct.pack(">I", 5)[1:] + struct.pack(">BBI", 0, 0, 1) + b"\0\xff\xff\xff\xff")


class TestBulk:
    @pytest.fixture
    def door(self, remote):
        token = remote.add("kit", admin=True)
        return None, (remote.url, _bearer(token)), lambda: remote.session(token)

    @pytest.fixture
    def client(self, remote):
        with flight.connect(f"grpc://127.0.0.1:{remote.door.bulk_port}") as client:
            yield client

    @pytest.fixture
    def options(self, door):
        headers = [(name.encode(), value.encode()) for name, value in door[1][1]]
        return flight.FlightCallOptions(timeout=5.0, headers=headers)

    def test_bytes_that_are_no_http(self, remote, unharmed):
        dice, where = random.Random(5), (socket.AF_INET, ("127.0.0.1", remote.door.bulk_port))
        for turn in range(150):
            send(where, dice.randbytes(dice.randrange(2000)) if turn % 2 else PREFACE + b"".join(frames(dice)))

    def test_nobody_without_a_token_learns_or_leaves_anything(self, client, remote, unharmed):
        matched = unharmed.match(chain(0, 3), 0.0)
        ask = Ask(unharmed._line._at.session, matched.lease, [0, 1, 2]).pack()
        for token in ("", "Bearer", "Bearer ", "Bearer kvt_x", "Basic " + "x" * 4000):
            options = flight.FlightCallOptions(timeout=5.0, headers=[(b"authorization", token.encode())])
            for call in (
                lambda options=options: client.do_get(flight.Ticket(ask), options).read_all(),
                lambda options=options: put(client, ask, options, [(0, pa.array([1, 2], pa.uint8()))]),
                lambda options=options: list(client.list_flights(options=options)),
                lambda options=options: list(client.do_action("x", options)),
            ):
                with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
                    call()
        assert remote.door._desk.counters["unauthenticated"] >= 20
        unharmed.release(matched.lease)

    def test_calls_that_make_no_sense(self, client, options, unharmed):
        dice = random.Random(6)
        number = unharmed._line._at.session
        matched, reserved = unharmed.match(chain(0, 3), 0.0), reserve(unharmed, 100, 3)
        some = [
            pa.array(np.frombuffer(payload_of(100, NBYTES), np.uint8)),
            pa.array(list(dice.randbytes(3000)), pa.uint8()),
            pa.array([1.5, None]),
            pa.array(["text"]),
            pa.array([None, 3], pa.uint8()),
            pa.array([], pa.uint8()),
        ]
        for _ in range(150):
            call = dice.choice([0, 1, matched.lease, reserved.ticket, 1 << 63])
            ask = Ask(
                dice.choice([number, 0, 5]), call, [dice.randrange(1 << 32) for _ in range(dice.randrange(4))]
            ).pack()
            ask = dice.choice([ask, dice.randbytes(dice.randrange(40)), b"", bytes(1 << 19)])
            with suppress(flight.FlightError, pa.ArrowException, OSError):
                client.do_get(flight.Ticket(ask), options).read_all()
            with suppress(flight.FlightError, pa.ArrowException, OSError):
                put(client, ask, options, [(dice.choice([0, 1, 2, 9, None]), dice.choice(some)) for _ in range(3)])
        unharmed.release(matched.lease)
        unharmed.commit(reserved.ticket, [])

    def test_no_tenant_gets_anothers_bytes_whatever_it_names(self, client, remote, unharmed, host):
        spy = remote.session(remote.add("spy"))
        headers = [(b"authorization", f"Bearer {_token_of(spy)}".encode())]
        options = flight.FlightCallOptions(timeout=5.0, headers=headers)
        matched = unharmed.match(chain(0, 3), 0.0)
        before = host.hierarchy.arena.memory.copy()
        reserved = reserve(unharmed, 100, 2)
        dice = random.Random(7)
        for session in (unharmed._line._at.session, spy._line._at.session):
            for call in (matched.lease, reserved.ticket, *(dice.randrange(1 << 16) for _ in range(20))):
                ask = Ask(session, call, [0, 1, 2]).pack()
                with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
                    client.do_get(flight.Ticket(ask), options).read_all()
                payload = pa.array(np.frombuffer(payload_of(100, NBYTES), np.uint8))
                with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
                    put(client, Ask(session, call).pack(), options, [(0, payload)])
        assert (host.hierarchy.arena.memory == before).all()
        unharmed.release(matched.lease)
        unharmed.commit(reserved.ticket, [])
        spy.close()


def _token_of(session):
    return session._line._way.metadata[0][1].removeprefix("Bearer ")


def put(client, ask, options, payloads):
    schema = pa.schema([pa.field("payload", payloads[0][1].type)])
    writer, reader = client.do_put(flight.FlightDescriptor.for_command(ask), schema, options)
    with writer:
        for position, payload in payloads:
            batch = pa.RecordBatch.from_arrays([payload], schema=schema)
            if position is None:
                writer.write_batch(batch)
            else:
                writer.write_with_metadata(batch, pa.py_buffer(struct.pack("<I", position)))
        writer.done_writing()
        answer = reader.read()
        if answer is None:
            raise flight.FlightServerError("no answer")
        return answer.to_pybytes()


def test_a_token_that_was_revoked_is_good_for_nothing_when_it_is_played_again(remote):
    token = remote.add("alice", admin=True)
    session = remote.session(token)
    save(session, 0, 2)
    matched = session.match(chain(0, 2), 0.0)
    number, carrier = session._line._at.session, session._line.mapping._carrier
    tokens.revoke(remote.tokens, "alice")
    remote.door.register.refresh()
    with pytest.raises(SessionError, match="not known here"):
        list(carrier.get(Ask(number, matched.lease, [0]), NBYTES))
    request = pb.MatchRequest(session=number, keys=b"".join(chain(0, 2))).SerializeToString()
    with grpc.insecure_channel(remote.url[7:]) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/kvtier.v1.Door/Match")(request, timeout=5.0, metadata=_bearer(token))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    session.close()


def loads(session):
    matched = session.match(chain(0, 3), 1.0)
    try:
        return holds(session, matched, 0)
    finally:
        session.release(matched.lease)


FLOOD = """
import socket, sys, time
port, greeting = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
held = []
for _ in range(10_000):
    one = socket.socket()
    one.settimeout(5.0)
    try:
        one.connect(("127.0.0.1", port))
        one.sendall(greeting)
        held.append(one)
    except OSError:
        one.close()
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "greeting", [b"", PREFACE, b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "idle", "half a handshake"]
)
@pytest.mark.parametrize("which", ["port", "bulk_port"])
def test_ten_thousand_connections(remote, which, greeting):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 12_000:
        pytest.skip("this process may not have 12,000 files open")
    session = remote.session(remote.add("kit", admin=True))
    save(session, 0, 3)
    process, files = psutil.Process(), psutil.Process().num_fds()
    command = [sys.executable, "-c", FLOOD, str(getattr(remote.door, which)), greeting.hex()]
    flood = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert int(flood.stdout.readline()) > 5000
        assert eventually(lambda: loads(session)), "who is in goes on"
        deadline = time.monotonic() + 45.0
        while process.num_fds() > files + CONNECTIONS:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        token = remote.add("late", admin=True)
        while True:
            with suppress(SessionError):
                late = remote.session(token)
                break
            assert time.monotonic() < deadline, "who is new gets in again"
        assert holds(late, late.match(chain(0, 3), 1.0), 0)
        late.close()
    finally:
        flood.communicate()
        session.close()

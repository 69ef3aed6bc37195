"""A session with a host's kvtier: over its Unix socket, or from another host."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier.client.attachment import Attachment
from kvtier.client.line import Line
from kvtier.client.mapping import SocketWay
from kvtier.client.way import Way
from kvtier.errors import DeadlineExceeded, ProtocolMismatch, SessionUnavailable, UsageError
from kvtier.hierarchy.answers import GRANT, SLOT, Matched, Placement, Reserved
from kvtier.memory.device import DeviceMemory, attach
from kvtier.rpc import kvtier_pb2 as pb
from kvtier.rpc.channel import error_of, open_channel
from kvtier.rpc.conversions import pack_keys, pack_numbers, unpack_array
from kvtier.rpc.kvtier_pb2_grpc import DoorStub
from kvtier.tiers.base import TierNumber

PREFETCH_TIMEOUT = 60.0
_SAME = "install the same kvtier on both sides"
PIN_PATIENCE = 10.0
"""Seconds that blocks which are pinned may take to come up from other tiers."""


class DoorSession:
    """`Session` with the host behind a door. Attaches at once, and again whenever the host comes back.

    While nobody answers, calls raise `SessionUnavailable` without waiting. What was leased or reserved before is void
    then; `epoch` has changed. Slots are kept for those who still write into them: for each reservation until its
    `commit`, or until the `writing` context that it was made in is left; without such a context until `close`.

    gRPC does not survive a fork: in a forked child every call raises `UsageError`; open a session there instead.

    Args:
        door: its Unix socket, or another way to it.
        connect_timeout: seconds that attaching may take at first.
        call_timeout: seconds that a call may take, besides what it was told to wait.
        clock: monotonic seconds.

    Raises:
        SessionUnavailable: nobody answers there.
        ProtocolMismatch: the host has another version.
        Unauthenticated: this user may not use its arena, or the token is not one of its tokens.
    """

    def __init__(
        self,
        door: Path | str | Way,
        *,
        connect_timeout: float = 5.0,
        call_timeout: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout = call_timeout
        self._clock = clock
        self._calls = itertools.count(1)
        self._mine = _Mine()
        self._loose: set[int] = set()
        way = SocketWay(Path(door)) if isinstance(door, Path | str) else door
        self._line = Line(way, connect_timeout, clock)

    @property
    def epoch(self) -> int:
        return self._line.epoch

    @property
    def salt(self) -> str:
        return self._line.salt or ""

    def claim(self, keyspace: bytes) -> None:
        self._line.claim(keyspace)

    def readable(self) -> NDArray[np.uint8]:
        return self._line.mapping.readable

    def writable(self) -> NDArray[np.uint8]:
        return self._line.mapping.writable()

    def generations(self) -> NDArray[np.uint32]:
        return self._line.mapping.generations

    def attach(self, device: str) -> DeviceMemory | str:
        at, until = self._attached()
        request = pb.DeviceRequest(session=at.session, after=at.sent)
        attached = attach(self._line.ask(self._line.stub.Device, request, until, at).handle, device)
        if isinstance(attached, str) and attached:
            self._line.note(pb.ClientNote(refused=pb.Refused(why=attached)))
        return attached

    def match(
        self,
        keys: Sequence[bytes],
        wait: float,
        *,
        prefill: float = 0.0,
        stream: bool = False,
        after: int = 0,
        device: int = 0,
        again: bool = False,
    ) -> Matched:
        at, until = self._attached(wait)
        call = next(self._calls)
        request = pb.MatchRequest(session=at.session, call=call, keys=pack_keys(keys), wait=wait, prefill=prefill)
        request.after, request.stream, request.given, request.device = at.sent, stream, after, device
        request.again = again
        try:
            reply = self._line.ask(self._line.stub.Match, request, until, at)
            slots, tiers, inside = _leased(reply, len(keys))
            if reply.leased:
                at.memory.leased(call, keys, slots)
        except BaseException:
            at.note(pb.ClientNote(release=pb.Release(call=call)))
            raise
        return Matched(call if reply.leased else 0, slots, reply.staging, tiers, inside, reply.device)

    def fetch(self, lease: int, first: int, end: int) -> int:
        return self._line.mapping.fetch(lease, first, end)

    def release(self, lease: int, seconds: float = 0.0, part: float = 1.0) -> None:
        self._line.mapping.released(lease)
        # A number of an earlier attachment names nothing on this one.
        self._line.note(pb.ClientNote(release=pb.Release(call=lease, seconds=seconds, part=part)))

    def reserve(self, keys: Sequence[bytes], nbytes: Sequence[int], start: int) -> Reserved:
        if len(keys) - start != len(nbytes):
            raise UsageError(f"{len(keys)} keys from {start} on and {len(nbytes)} sizes do not go together")
        packed, sizes = pack_keys(keys), pack_numbers(nbytes)
        at, until = self._attached()
        call = next(self._calls)
        self._line.tickets[call] = at
        if not at.begin():
            del self._line.tickets[call]
            raise SessionUnavailable(f"the host at {self._line.where} has just gone away")
        request = pb.ReserveRequest(
            session=at.session, after=at.sent, call=call, keys=packed, nbytes=sizes, start=start
        )
        try:
            reply = self._line.ask(self._line.stub.Reserve, request, until, at)
            grants = _granted(reply, len(nbytes))
            if reply.granted:
                at.memory.reserved(call, nbytes, grants)
        except BaseException:
            self._abort(call)
            raise
        if not reply.granted:
            self._written(call)
        elif self._mine.tickets is None:
            self._loose.add(call)
        else:
            self._mine.tickets.append(call)
        return Reserved(call if reply.granted else 0, grants, reply.reason)

    @contextmanager
    def writing(self) -> Iterator[None]:
        mine: list[int] = []
        outer, self._mine.tickets = self._mine.tickets, mine
        try:
            yield
        finally:
            self._mine.tickets = outer
            for ticket in mine:
                self._abort(ticket)

    def commit(self, ticket: int, written: Sequence[int], seconds: float = 0.0, raw: int = 0) -> list[bool]:
        at = self._line.tickets.get(ticket)
        if at is None or at.lost:
            self._written(ticket)
            return [False] * len(written)
        try:
            sent = at.memory.send(ticket, written)
            request = pb.CommitRequest(session=at.session, after=at.sent, call=ticket, seconds=seconds, raw=raw)
            request.written = pack_numbers(sent)
            reply = self._line.ask(self._line.stub.Commit, request, self._clock() + self._timeout, at)
        except BaseException:
            self._abort(ticket)
            raise
        self._written(ticket)
        visible = dict(zip(sent, reply.visible, strict=False))
        return [bool(visible.get(position)) for position in written]

    def condemn(self, keys: Sequence[bytes], why: str) -> None:
        self._line.note(pb.ClientNote(condemn=pb.Condemn(keys=pack_keys(keys), why=why)))

    def move(self, keys: Sequence[bytes], tier: TierNumber, wait: float) -> int:
        packed = pack_keys(keys)
        at, until = self._attached(wait)
        request = pb.MoveRequest(session=at.session, after=at.sent, keys=packed, tier=tier, wait=wait)
        reply = self._line.ask(self._line.stub.Move, request, until, at)
        if reply.late:
            raise DeadlineExceeded(f"moving {len(keys)} blocks takes longer than {wait} s; it goes on")
        return reply.there

    def prefetch(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        packed = pack_keys(keys)
        at, _ = self._attached()
        request = pb.PrefetchRequest(session=at.session, after=at.sent, keys=packed, tier=tier)
        answer: Future[int] = Future()
        answer.set_running_or_notify_cancel()

        def settle(call: grpc.Future[pb.PrefetchReply]) -> None:
            try:
                answer.set_result(call.result().there)
            except grpc.RpcError as exc:
                answer.set_exception(error_of(exc, self._line.where))
            except grpc.FutureCancelledError:
                answer.set_exception(SessionUnavailable("the session was closed"))

        self._line.begin(self._line.stub.Prefetch, request, PREFETCH_TIMEOUT).add_done_callback(settle)
        return answer

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        at, until = self._attached(PIN_PATIENCE)
        request = pb.PinRequest(session=at.session, after=at.sent, keys=pack_keys(keys), seconds=seconds)
        return self._line.ask(self._line.stub.Pin, request, until, at).blocks

    def unpin(self, keys: Sequence[bytes]) -> int:
        at, until = self._attached()
        request = pb.PinRequest(session=at.session, after=at.sent, keys=pack_keys(keys))
        return self._line.ask(self._line.stub.Pin, request, until, at).blocks

    def evict(self, keys: Sequence[bytes]) -> int:
        at, until = self._attached()
        request = pb.DropRequest(session=at.session, after=at.sent, keys=pack_keys(keys))
        return self._line.ask(self._line.stub.Drop, request, until, at).blocks

    def clear(self, space: bytes) -> int:
        at, until = self._attached()
        request = pb.DropRequest(session=at.session, after=at.sent, space=space)
        return self._line.ask(self._line.stub.Drop, request, until, at).blocks

    def inspect(self, keys: Sequence[bytes]) -> list[dict[str, Any] | None]:
        packed = pack_keys(keys)
        at, until = self._attached()
        request = pb.InspectRequest(session=at.session, after=at.sent, keys=packed)
        reply = self._line.ask(self._line.stub.Inspect, request, until, at)
        return msgspec.json.decode(reply.json, type=list[dict[str, Any] | None])

    def where(self, keys: Sequence[bytes]) -> Placement:
        packed = pack_keys(keys)
        at, until = self._attached()
        request = pb.WhereRequest(session=at.session, after=at.sent, keys=packed)
        return msgspec.json.decode(self._line.ask(self._line.stub.Where, request, until, at).json, type=Placement)

    def status(self) -> dict[str, Any]:
        at, until = self._attached()
        request = pb.StatusRequest(session=at.session, after=at.sent)
        reply = self._line.ask(self._line.stub.Status, request, until, at)
        return msgspec.json.decode(reply.json, type=dict[str, Any])

    def close(self) -> None:
        for ticket in list(self._loose):
            self._abort(ticket)
        self._line.close()

    def _attached(self, wait: float = 0.0) -> tuple[Attachment, float]:
        """The attachment to ask, and until when the answer may take."""
        until = self._clock() + wait + self._timeout
        return self._line.attached(until), until

    def _abort(self, ticket: int) -> None:
        at = self._written(ticket)
        if at is not None:
            at.note(pb.ClientNote(abort=pb.Abort(call=ticket)))

    def _written(self, ticket: int) -> Attachment | None:
        """Nobody writes into this reservation any more."""
        self._loose.discard(ticket)
        at = self._line.tickets.pop(ticket, None)
        if at is not None:
            at.memory.ended(ticket)
            at.end()
        return at


def _leased(reply: pb.MatchReply, asked: int) -> tuple[NDArray[Any], NDArray[np.uint8], NDArray[np.bool_]]:
    """Slots, their tiers, and whether they are in the GPU tier's memory."""
    slots, tiers = unpack_array(reply.slots, SLOT), unpack_array(reply.tiers, np.uint8)
    inside = unpack_array(reply.inside or bytes(len(slots)), np.bool_)
    if not len(slots) == len(tiers) == len(inside) <= asked:
        raise ProtocolMismatch(f"the host gives {len(slots)} slots for {asked} keys; {_SAME}")
    return slots, tiers, inside


def _granted(reply: pb.ReserveReply, asked: int) -> NDArray[Any]:
    grants = unpack_array(reply.grants, GRANT)
    if reply.granted and len(grants) != asked:
        raise ProtocolMismatch(f"the host grants {len(grants)} slots for {asked} blocks; {_SAME}")
    return grants


class _Mine(threading.local):
    """Reservations made in this thread's innermost `writing` context; None outside of any."""

    tickets: list[int] | None = None


def ask_where(socket: Path | str, keys: Sequence[bytes], *, timeout: float = 1.0) -> Placement:
    """Which hosts hold how much of a chain, as the host whose door is at `socket` knows, without a session.

    Raises:
        SessionError: it does not answer.
    """
    request = pb.WhereRequest(keys=pack_keys(keys))
    with open_channel(Path(socket)) as channel:
        try:
            reply = DoorStub(channel).Where(request, timeout=timeout)
        except grpc.RpcError as exc:
            raise error_of(exc, str(socket)) from exc
    return msgspec.json.decode(reply.json, type=Placement)


def ask_status(socket: Path | str, *, timeout: float = 1.0) -> dict[str, Any]:
    """The status of the host whose door is at `socket`, without a session or its arena.

    Raises:
        SessionError: it does not answer.
    """
    with open_channel(Path(socket)) as channel:
        try:
            reply = DoorStub(channel).Status(pb.StatusRequest(), timeout=timeout)
        except grpc.RpcError as exc:
            raise error_of(exc, str(socket)) from exc
    return msgspec.json.decode(reply.json, type=dict[str, Any])

"""What each call of the door does. Everything here runs on the door's loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from grpc import aio

import kvtier
from kvtier.block import SPACE_NBYTES
from kvtier.errors import DeadlineExceeded, KVTierError, ProtocolMismatch, SessionUnavailable, UsageError
from kvtier.hierarchy.cache import Hierarchy
from kvtier.hierarchy.loading import Wish
from kvtier.hierarchy.seeking import LOOKUP
from kvtier.memory.lock import is_free
from kvtier.rpc import kvtier_pb2 as pb
from kvtier.rpc.channel import status_of
from kvtier.rpc.conversions import unpack_keys, unpack_numbers
from kvtier.rpc.kvtier_pb2_grpc import DoorServicer
from kvtier.rpc.protocol import LONGEST_WAIT, PROTOCOL, SESSIONS, client_lock
from kvtier.tiers.base import OWN, TierNumber
from kvtier_services.gateway.guests import Guest

_log = logging.getLogger(__name__)

HANDSHAKE = 10.0
"""Seconds that a client may take to begin its session."""
T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    """What came through the door, by name of the call; plain numbers that tests and metrics read.

    Attributes:
        calls: how many.
        notes: what was said on the sessions' streams.
        failed: calls that were answered by an error.
        request_nbytes, reply_nbytes: the largest message.
    """

    calls: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    request_nbytes: Counter[str] = field(default_factory=Counter)
    reply_nbytes: Counter[str] = field(default_factory=Counter)


class _Message(Protocol):
    def ByteSize(self) -> int: ...  # noqa: N802


Q = TypeVar("Q", bound=_Message)
A = TypeVar("A", bound=_Message)
Context = aio.ServicerContext[Any, Any]


def _call(answer: Callable[[Calls, Q], Awaitable[A]]) -> Callable[[Calls, Q, Context], Awaitable[A]]:
    """Make a unary call of a method: count it, and say its errors as statuses."""
    name = answer.__name__

    async def call(self: Calls, request: Q, context: Context) -> A:
        tally = self.tally
        tally.calls[name] += 1
        tally.request_nbytes[name] = max(tally.request_nbytes[name], request.ByteSize())
        try:
            reply = await answer(self, request)
        except (KVTierError, UsageError) as exc:
            tally.failed[name] += 1
            await context.abort(status_of(exc), str(exc))
        tally.reply_nbytes[name] = max(tally.reply_nbytes[name], reply.ByteSize())
        return reply

    return call


class Calls(DoorServicer):
    """The service `kvtier.v1.Door` over one hierarchy.

    Args:
        hierarchy: what is asked.
        node: the host's name.

    Attributes:
        tally: what came through.
        guests: sessions, by number.
        gone: sessions that have ended and whose lock file may still be there.
    """

    def __init__(self, hierarchy: Hierarchy, node: str) -> None:
        self._hierarchy = hierarchy
        self._node = node
        self._streams: set[asyncio.Task[Any]] = set()
        self.tally = Tally()
        self.guests: dict[int, Guest] = {}
        self.gone: set[int] = set()

    def hang_up(self) -> None:
        """End all sessions."""
        for stream in self._streams:
            stream.cancel()

    async def Attach(  # type: ignore[override]  # noqa: N802 - the other style of grpc.aio: replies are written
        self, request_iterator: AsyncIterable[pb.ClientNote], context: Context
    ) -> None:
        """A session, from its beginning to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        self.tally.calls["Attach"] += 1
        guest: Guest | None = None
        try:
            notes = aiter(request_iterator)
            async with asyncio.timeout(HANDSHAKE):
                guest = await self._handshake(notes, context)
            async for note in notes:
                self.tally.notes[note.WhichOneof("note") or ""] += 1
                guest.hear(note)
        except (KVTierError, UsageError) as exc:
            self.tally.failed["Attach"] += 1
            await context.abort(status_of(exc), str(exc))
        except (StopAsyncIteration, TimeoutError):
            return
        finally:
            self._streams.discard(task)
            if guest is not None:
                self._leave(guest)

    async def _handshake(self, notes: AsyncIterator[pb.ClientNote], context: Context) -> Guest:
        hello = (await anext(notes)).hello
        if hello.protocol != PROTOCOL:
            raise ProtocolMismatch(
                f"the client speaks protocol {hello.protocol}, this host {PROTOCOL} (kvtier {kvtier.__version__}): "
                "install the same kvtier on both sides, and restart the older one"
            )
        arena = self._hierarchy.arena
        folder = arena.folder
        assert folder is not None
        welcome = pb.Welcome(
            protocol=PROTOCOL,
            epoch=arena.epoch,
            arena=str(folder),
            capacity=arena.capacity,
            node=self._node,
            version=kvtier.__version__,
        )
        await context.write(pb.HostNote(welcome=welcome))
        session = (await anext(notes)).join.session
        if session not in SESSIONS or session in self.guests:
            raise SessionUnavailable(f"session number {session} cannot be used; attach with another one")
        if is_free(client_lock(folder, session)):
            raise ProtocolMismatch(f"session {session} holds no lock on {client_lock(folder, session)}")
        guest = self.guests[session] = Guest(self._hierarchy, session, hello.client)
        _log.info("attached session=%d client=%r", session, hello.client)
        try:
            await context.write(pb.HostNote(joined=pb.Joined()))
        except BaseException:
            self._leave(guest)
            raise
        return guest

    def _leave(self, guest: Guest) -> None:
        del self.guests[guest.session]
        self.gone.add(guest.session)
        guest.leave()
        _log.info("detached session=%d client=%r", guest.session, guest.client)

    @_call
    async def Match(self, request: pb.MatchRequest) -> pb.MatchReply:  # noqa: N802
        """See `Session.match`."""
        guest = await self._guest(request.session, request.after)
        hierarchy, first = self._hierarchy, not request.stream or request.wait == 0
        wish = Wish(
            guest.session,
            unpack_keys(request.keys),
            request.prefill,
            request.stream,
            request.given,
            first,
            request.device,
        )
        until = time.monotonic() + min(request.wait, LONGEST_WAIT)
        look = hierarchy.look(wish)
        if (request.wait or request.stream) and look.lookups:
            hierarchy.release(look.matched.lease)
            await _all_within(look.lookups, LOOKUP)
            look = hierarchy.look(wish, look.sought)
        while (flight := look.staging) is not None and (news := look.news) is not None:
            left = until - time.monotonic()
            if left <= 0:
                break
            hierarchy.release(look.matched.lease)
            await _within(news, left)
            look = hierarchy.look(wish, look.sought)
            if flight.done.done():
                break
        matched = hierarchy.settle(look)
        leased = guest.lease(request.call, matched.lease)
        if matched.lease and not leased:
            return pb.MatchReply()
        return pb.MatchReply(
            leased=leased,
            slots=matched.slots.tobytes(),
            tiers=matched.tiers.tobytes(),
            staging=matched.staging,
            inside=matched.inside.tobytes() if matched.inside.any() else b"",
            device=matched.device,
        )

    @_call
    async def Reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:  # noqa: N802
        """See `Session.reserve`."""
        guest = await self._guest(request.session, request.after)
        keys, nbytes = unpack_keys(request.keys), unpack_numbers(request.nbytes)
        if len(keys) - request.start != len(nbytes):
            raise UsageError(f"{len(keys)} keys from {request.start} on and {len(nbytes)} sizes do not go together")
        reserved = self._hierarchy.reserve(guest.session, keys, nbytes, request.start)
        granted = guest.ticket(request.call, reserved.ticket)
        return pb.ReserveReply(granted=granted, grants=reserved.grants.tobytes(), reason=reserved.reason)

    @_call
    async def Commit(self, request: pb.CommitRequest) -> pb.CommitReply:  # noqa: N802
        """See `Session.commit`."""
        guest = await self._guest(request.session, request.after)
        ticket, written = guest.end_ticket(request.call), unpack_numbers(request.written)
        visible = self._hierarchy.commit(guest.session, ticket, written, request.seconds)
        return pb.CommitReply(visible=bytes(visible))

    @_call
    async def Move(self, request: pb.MoveRequest) -> pb.MoveReply:  # noqa: N802
        """See `Session.move`."""
        await self._guest(request.session, request.after)
        moved = self._hierarchy.move(unpack_keys(request.keys), _tier(request.tier))
        if not await _within(moved, request.wait):
            return pb.MoveReply(late=True)
        return pb.MoveReply(there=moved.result())

    @_call
    async def Prefetch(self, request: pb.PrefetchRequest) -> pb.PrefetchReply:  # noqa: N802
        """See `Session.prefetch`."""
        await self._guest(request.session, request.after)
        there = self._hierarchy.prefetch(unpack_keys(request.keys), _tier(request.tier))
        return pb.PrefetchReply(there=await _result(there))

    @_call
    async def Pin(self, request: pb.PinRequest) -> pb.PinReply:  # noqa: N802
        """See `Session.pin` and `Session.unpin`."""
        guest = await self._guest(request.session, request.after)
        keys = unpack_keys(request.keys)
        if not request.seconds > 0:
            return pb.PinReply(blocks=self._hierarchy.unpin(keys))
        pinned = self._hierarchy.pin(guest.session, keys, request.seconds)
        return pb.PinReply(blocks=await _result(pinned))

    @_call
    async def Drop(self, request: pb.DropRequest) -> pb.DropReply:  # noqa: N802
        """See `Session.evict` and `Session.clear`."""
        await self._guest(request.session, request.after)
        if len(request.space) not in (0, SPACE_NBYTES):
            raise UsageError(f"a keyspace is named by {SPACE_NBYTES} bytes, not {len(request.space)}")
        if request.space:
            return pb.DropReply(blocks=await asyncio.to_thread(self._hierarchy.clear, request.space))
        keys = unpack_keys(request.keys)
        return pb.DropReply(blocks=await asyncio.to_thread(self._hierarchy.evict, keys))

    @_call
    async def Device(self, request: pb.DeviceRequest) -> pb.DeviceReply:  # noqa: N802
        """See `Session.attach`."""
        await self._guest(request.session, request.after)
        return pb.DeviceReply(handle=self._hierarchy.state.device.handle())

    @_call
    async def Where(self, request: pb.WhereRequest) -> pb.WhereReply:  # noqa: N802
        """See `Session.where`."""
        if request.session:
            await self._guest(request.session, request.after)
        placement = await asyncio.to_thread(self._hierarchy.where, unpack_keys(request.keys))
        return pb.WhereReply(json=msgspec.json.encode(placement))

    @_call
    async def Inspect(self, request: pb.InspectRequest) -> pb.InspectReply:  # noqa: N802
        """See `Session.inspect`."""
        if request.session:
            await self._guest(request.session, request.after)
        found = await asyncio.to_thread(self._hierarchy.inspect, unpack_keys(request.keys))
        return pb.InspectReply(json=msgspec.json.encode(found))

    @_call
    async def Status(self, request: pb.StatusRequest) -> pb.StatusReply:  # noqa: N802
        """See `Session.status`; says also what came through the door."""
        if request.session:
            await self._guest(request.session, request.after)
        status = await asyncio.to_thread(self._hierarchy.status)
        door = msgspec.to_builtins(self.tally)
        clients = [guest.client for guest in self.guests.values()]
        return pb.StatusReply(
            json=msgspec.json.encode({**status, "node": self._node, "clients": clients, "door": door})
        )

    async def _guest(self, session: int, after: int) -> Guest:
        """Who calls, once what it said before is heard."""
        guest = self.guests.get(session)
        if guest is None:
            raise SessionUnavailable(f"session {session} is not attached here; attach again")
        await guest.caught_up(after)
        return guest


async def _all_within(futures: Iterable[Future[T]], seconds: float) -> None:
    """Wait for what goes on whatever becomes of this call."""
    await asyncio.wait([asyncio.wrap_future(future) for future in futures], timeout=seconds)


async def _within(future: Future[T], seconds: float) -> bool:
    """Wait for what goes on whatever becomes of this call; whether it is done."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    done, _ = await asyncio.wait({waiting}, timeout=min(seconds, LONGEST_WAIT))
    return bool(done)


async def _result(future: Future[T]) -> T:
    if not await _within(future, LONGEST_WAIT):
        raise DeadlineExceeded(f"that takes longer than {LONGEST_WAIT:g} s; it goes on")
    return future.result()


def _tier(number: int) -> TierNumber:
    if number not in OWN:
        raise UsageError(f"there is no tier {number} to bring blocks to")
    return TierNumber(number)

"""What each call of the door does. Everything here runs on the door's loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

import kvtier
from kvtier.block import ADDRESS_NBYTES, SPACE_NBYTES, slot_nbytes
from kvtier.errors import (
    DeadlineExceeded,
    KVTierError,
    ProtocolMismatch,
    SessionUnavailable,
    Unauthenticated,
    UsageError,
)
from kvtier.hierarchy.cache import Hierarchy
from kvtier.hierarchy.loading import Look, Wish
from kvtier.hierarchy.seeking import LOOKUP, Sought
from kvtier.rpc import kvtier_pb2 as pb
from kvtier.rpc.channel import status_of
from kvtier.rpc.conversions import unpack_keys, unpack_numbers
from kvtier.rpc.kvtier_pb2_grpc import DoorServicer
from kvtier.rpc.protocol import LONGEST_WAIT, PROTOCOL
from kvtier.tiers.base import OWN, TierNumber
from kvtier_services.gateway.callers import ENGINE, Caller
from kvtier_services.gateway.gates import Context, Gate
from kvtier_services.gateway.guests import Guest

_log = logging.getLogger(__name__)

HANDSHAKE = 10.0
"""Seconds that a client may take to begin its session."""
CLIENT = 200
"""Characters of what a client says of itself."""
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

    def __add__(self, other: Tally) -> Tally:
        counted = (getattr(self, name) + getattr(other, name) for name in ("calls", "notes", "failed"))
        largest = (getattr(self, name) | getattr(other, name) for name in ("request_nbytes", "reply_nbytes"))
        return Tally(*counted, *largest)


class _Message(Protocol):
    def ByteSize(self) -> int: ...  # noqa: N802


Q = TypeVar("Q", bound=_Message)
A = TypeVar("A", bound=_Message)


AUDITED = frozenset(("Move", "Drop"))
"""Calls that touch what is others'."""
AUDITED_OF_ADMINS = frozenset(("Pin", "Status"))
"""Calls that do so when an admin makes them."""


def _call(answer: Callable[[Calls, Q], Awaitable[A]]) -> Callable[[Calls, Q, Context], Awaitable[A]]:
    """Make a unary call of a method: see who calls, count it, and say its errors as statuses."""
    name = answer.__name__

    async def call(self: Calls, request: Q, context: Context) -> A:
        tally = self.tally
        tally.calls[name] += 1
        tally.request_nbytes[name] = max(tally.request_nbytes[name], request.ByteSize())
        caller, result = None, "cancelled"
        try:
            caller = self.gate.caller(context)
            self.check(request, caller)
            with self.gate.calling(caller):
                reply = await answer(self, request)
            result = f"ok: {_said(reply)}"
        except (KVTierError, UsageError) as exc:
            tally.failed[name] += 1
            result = f"refused: {exc}"
            await context.abort(status_of(exc), str(exc))
        finally:
            if caller is not None and (name in AUDITED or (caller.admin and name in AUDITED_OF_ADMINS)):
                self.gate.done(caller, context, name, _said(request), result)
        tally.reply_nbytes[name] = max(tally.reply_nbytes[name], reply.ByteSize())
        return reply

    return call


class Calls(DoorServicer):
    """The service `kvtier.v1.Door` over one hierarchy.

    Args:
        hierarchy: what is asked.
        node: the host's name.
        gate: who is let in.

    Attributes:
        gate: who is let in.
        tally: what came through.
        guests: sessions, by number.
    """

    def __init__(self, hierarchy: Hierarchy, node: str, gate: Gate) -> None:
        self._hierarchy = hierarchy
        self._node = node
        self._streams: dict[asyncio.Task[Any], Caller] = {}
        self.gate = gate
        self.tally = Tally()
        self.guests: dict[int, Guest] = {}

    def hang_up(self, whose: Callable[[Caller], bool] = lambda _: True) -> None:
        """End sessions; all of them unless it is said whose."""
        for stream, caller in list(self._streams.items()):
            if whose(caller):
                stream.cancel()

    def check(self, request: Any, caller: Caller) -> None:
        """See that a call is made by whom its session belongs to."""
        session = request.session
        if not session and not self.gate.open_calls:
            raise SessionUnavailable("this call needs a session here; attach first")
        guest = self.guests.get(session)
        if guest is not None and guest.caller is not caller:
            raise SessionUnavailable(f"session {session} is not attached here; attach again")

    async def Attach(  # type: ignore[override]  # noqa: N802 - the other style of grpc.aio: replies are written
        self, request_iterator: AsyncIterable[pb.ClientNote], context: Context
    ) -> None:
        """A session, from its beginning to its end."""
        task = asyncio.current_task()
        assert task is not None
        self.tally.calls["Attach"] += 1
        guest: Guest | None = None
        try:
            caller = self._streams[task] = self.gate.caller(context)
            notes = aiter(request_iterator)
            async with asyncio.timeout(HANDSHAKE):
                guest = await self._handshake(notes, context, caller)
            async for note in notes:
                self.tally.notes[note.WhichOneof("note") or ""] += 1
                guest.hear(note)
        except (KVTierError, UsageError) as exc:
            self.tally.failed["Attach"] += 1
            await context.abort(status_of(exc), str(exc))
        except (StopAsyncIteration, TimeoutError):
            return
        finally:
            self._streams.pop(task, None)
            if guest is not None:
                self._leave(guest)

    async def _handshake(self, notes: AsyncIterator[pb.ClientNote], context: Context, caller: Caller) -> Guest:
        hello = (await anext(notes)).hello
        if hello.protocol != PROTOCOL:
            raise ProtocolMismatch(
                f"the client speaks protocol {hello.protocol}, this host {PROTOCOL} (kvtier {kvtier.__version__}): "
                "install the same kvtier on both sides, and restart the older one"
            )
        arena = self._hierarchy.arena
        welcome = self.gate.welcome(caller)
        welcome.protocol, welcome.version, welcome.node = PROTOCOL, kvtier.__version__, self._node
        welcome.epoch, welcome.capacity = arena.epoch, arena.capacity
        await context.write(pb.HostNote(welcome=welcome))
        session = self.gate.seat((await anext(notes)).join.session, caller)
        if session in self._hierarchy.state.ledger.sessions:
            raise SessionUnavailable(f"session number {session} cannot be used; attach with another one")
        client = "".join(letter if letter.isprintable() else "?" for letter in hello.client[:CLIENT])
        guest = self.guests[session] = Guest(self._hierarchy, session, client, caller)
        _log.info("attached session=%d caller=%s client=%r", session, caller.name, client)
        try:
            await context.write(pb.HostNote(joined=pb.Joined(session=session)))
        except BaseException:
            self._leave(guest)
            raise
        return guest

    def _leave(self, guest: Guest) -> None:
        del self.guests[guest.session]
        guest.leave()
        self.gate.left(guest)
        _log.info("detached session=%d client=%r", guest.session, guest.client)

    @_call
    async def Match(self, request: pb.MatchRequest) -> pb.MatchReply:  # noqa: N802
        """See `Session.match`."""
        guest = await self._guest(request.session, request.after)
        hierarchy, wait = self._hierarchy, _seconds(request.wait)
        first = not request.stream or wait == 0
        keys, device = unpack_keys(request.keys), request.device if guest.caller is ENGINE else 0

        def look_again(sought: Sought | None = None) -> Look:
            with hierarchy.state.lock:  # nothing comes in between, of which it would not be known whose it is
                own = guest.caller.loadable(hierarchy, keys)
                asks = request.prefill, request.stream, request.given, first, device, request.again
                return hierarchy.look(Wish(guest.session, own, *asks), sought)

        until = time.monotonic() + wait
        look = look_again()
        if (wait or request.stream) and (lookups := look.lookups):
            hierarchy.release(look.matched.lease)
            await _all_within(lookups, LOOKUP)
            look = look_again(look.sought)
        while (flight := look.staging) is not None and (news := look.news) is not None:
            left = until - time.monotonic()
            if left <= 0:
                break
            hierarchy.release(look.matched.lease)
            await _within(news, left)
            look = look_again(look.sought)
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
            device=matched.device if guest.caller is ENGINE else 0,
        )

    @_call
    async def Reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:  # noqa: N802
        """See `Session.reserve`."""
        guest = await self._guest(request.session, request.after)
        keys, nbytes = unpack_keys(request.keys), unpack_numbers(request.nbytes)
        if len(keys) - request.start != len(nbytes):
            raise UsageError(f"{len(keys)} keys from {request.start} on and {len(nbytes)} sizes do not go together")
        caller, hierarchy = guest.caller, self._hierarchy
        if len(caller.own(hierarchy, keys)) < len(keys):
            raise Unauthenticated("one of these blocks belongs to another tenant")
        allowance = None
        if caller.tenant is not None and caller.tenant.quota.cpu:
            known = hierarchy.state.table.rows
            new = (n for key, n in zip(keys[request.start :], nbytes, strict=True) if key not in known)
            allowance = caller.tenant.allowance(hierarchy, sum(map(slot_nbytes, new)), keys)
        reserved = hierarchy.reserve(guest.session, keys, nbytes, request.start, allowance=allowance)
        granted = guest.ticket(request.call, reserved.ticket)
        return pb.ReserveReply(granted=granted, grants=reserved.grants.tobytes(), reason=reserved.reason)

    @_call
    async def Commit(self, request: pb.CommitRequest) -> pb.CommitReply:  # noqa: N802
        """See `Session.commit`."""
        guest = await self._guest(request.session, request.after)
        ticket, written = guest.end_ticket(request.call), unpack_numbers(request.written)
        if ticket is None:
            return pb.CommitReply(visible=bytes(len(written)))
        # Who maps the arena wrote there itself; of the others only what came and was found whole counts.
        there = written if guest.caller is ENGINE else [i for i in written if i in ticket.received]
        seconds = request.seconds if guest.caller.admin else 0.0
        visible = self._hierarchy.commit(guest.session, ticket.number, there, seconds, request.raw)
        seen = dict(zip(there, visible, strict=True))
        return pb.CommitReply(visible=bytes(seen.get(i, False) for i in written))

    @_call
    async def Move(self, request: pb.MoveRequest) -> pb.MoveReply:  # noqa: N802
        """See `Session.move`."""
        guest = await self._guest(request.session, request.after)
        guest.caller.needs_admin("moving blocks")
        moved = self._hierarchy.move(unpack_keys(request.keys), _tier(request.tier))
        if not await _within(moved, _seconds(request.wait)):
            return pb.MoveReply(late=True)
        return pb.MoveReply(there=moved.result())

    @_call
    async def Prefetch(self, request: pb.PrefetchRequest) -> pb.PrefetchReply:  # noqa: N802
        """See `Session.prefetch`."""
        guest = await self._guest(request.session, request.after)
        keys = guest.caller.loadable(self._hierarchy, unpack_keys(request.keys))
        there = await _result(self._hierarchy.prefetch(keys, _tier(request.tier)))
        # Whose blocks of other hosts are is known when they have come.
        return pb.PrefetchReply(there=min(there, len(guest.caller.own(self._hierarchy, keys))))

    @_call
    async def Pin(self, request: pb.PinRequest) -> pb.PinReply:  # noqa: N802
        """See `Session.pin` and `Session.unpin`."""
        guest = await self._guest(request.session, request.after)
        caller, tenant, keys = guest.caller, guest.caller.tenant, unpack_keys(request.keys)
        if not request.seconds > 0:
            return pb.PinReply(blocks=self._hierarchy.unpin(caller.own(self._hierarchy, keys)))
        keys, narrow = caller.loadable(self._hierarchy, keys), caller.narrow
        allowance = tenant.pinnable(self._hierarchy) if tenant is not None else None
        own = partial(narrow.owns, self._hierarchy) if narrow is not None else None
        pinned = self._hierarchy.pin(guest.session, keys, request.seconds, allowance, own)
        return pb.PinReply(blocks=await _result(pinned))

    @_call
    async def Drop(self, request: pb.DropRequest) -> pb.DropReply:  # noqa: N802
        """See `Session.evict` and `Session.clear`."""
        guest = await self._guest(request.session, request.after)
        guest.caller.needs_admin("dropping blocks")
        if len(request.space) not in (0, SPACE_NBYTES):
            raise UsageError(f"a keyspace is named by {SPACE_NBYTES} bytes, not {len(request.space)}")
        if request.space:
            return pb.DropReply(blocks=await asyncio.to_thread(self._hierarchy.clear, request.space))
        keys = unpack_keys(request.keys)
        return pb.DropReply(blocks=await asyncio.to_thread(self._hierarchy.evict, keys))

    @_call
    async def Device(self, request: pb.DeviceRequest) -> pb.DeviceReply:  # noqa: N802
        """See `Session.attach`."""
        guest = await self._guest(request.session, request.after)
        if guest.caller is not ENGINE:
            return pb.DeviceReply()
        return pb.DeviceReply(handle=self._hierarchy.state.device.handle())

    @_call
    async def Where(self, request: pb.WhereRequest) -> pb.WhereReply:  # noqa: N802
        """See `Session.where`."""
        caller = await self._anybody(request.session, request.after)
        keys = unpack_keys(request.keys)
        placement = await asyncio.to_thread(self._hierarchy.where, caller.own(self._hierarchy, keys))
        return pb.WhereReply(json=msgspec.json.encode(placement))

    @_call
    async def Inspect(self, request: pb.InspectRequest) -> pb.InspectReply:  # noqa: N802
        """See `Session.inspect`."""
        caller = await self._anybody(request.session, request.after)
        keys = unpack_keys(request.keys)
        own = caller.own(self._hierarchy, keys)
        found = await asyncio.to_thread(self._hierarchy.inspect, own)
        return pb.InspectReply(json=msgspec.json.encode(found + [None] * (len(keys) - len(own))))

    @_call
    async def Status(self, request: pb.StatusRequest) -> pb.StatusReply:  # noqa: N802
        """See `Session.status`; says also what came through the door."""
        caller = await self._anybody(request.session, request.after)
        if caller.narrow is not None:
            return pb.StatusReply(
                json=msgspec.json.encode({"node": self._node, **caller.narrow.status(self._hierarchy)})
            )
        status = await asyncio.to_thread(self._hierarchy.status)
        door = msgspec.to_builtins(self.tally)
        clients = [guest.client for guest in self.guests.values()]
        return pb.StatusReply(
            json=msgspec.json.encode({**status, "node": self._node, "clients": clients, "door": door})
        )

    async def _anybody(self, session: int, after: int) -> Caller:
        """Who calls, with a session or, where that is allowed, without."""
        return (await self._guest(session, after)).caller if session else ENGINE

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


def _seconds(said: float) -> float:
    """What a client is willing to wait; a client may say anything."""
    return min(said, LONGEST_WAIT) if said > 0 else 0.0


def _said(message: Any) -> dict[str, Any]:
    """What a message of an admin call says, for the record."""
    keys = getattr(message, "keys", b"")
    said = {"keys": len(keys) // ADDRESS_NBYTES, "first": keys[:8].hex(), "space": getattr(message, "space", b"").hex()}
    said |= {name: getattr(message, name) for name in ("tier", "blocks", "there", "late") if hasattr(message, name)}
    return {name: value for name, value in said.items() if value}


def _tier(number: int) -> TierNumber:
    if number not in OWN:
        raise UsageError(f"there is no tier {number} to bring blocks to")
    return TierNumber(number)

"""Who is let in by which door, and how a session begins there."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from grpc import aio

from kvtier.errors import ProtocolMismatch, SessionUnavailable, Unauthenticated
from kvtier.hierarchy.cache import Hierarchy
from kvtier.memory.lock import is_free
from kvtier.rpc import kvtier_pb2 as pb
from kvtier.rpc.protocol import SESSIONS, client_lock
from kvtier_services.gateway.audit import AuditLog, Refusals
from kvtier_services.gateway.callers import ENGINE, Caller
from kvtier_services.gateway.guests import Guest
from kvtier_services.gateway.register import Register, bearer

_log = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]


class Gate(Protocol):
    """One door's rules. Everything here runs on the door's loop."""

    open_calls: bool
    """Whether calls without a session are answered."""

    def caller(self, context: Context) -> Caller:
        """Who makes this call.

        Raises:
            Unauthenticated: nobody who is known.
        """
        ...

    def calling(self, caller: Caller) -> AbstractContextManager[None]:
        """While one call of theirs lasts.

        Raises:
            OverQuota: there are too many.
        """
        ...

    def welcome(self, caller: Caller) -> pb.Welcome:
        """What a client is told of where it comes in, besides what every door says."""
        ...

    def seat(self, asked: int, caller: Caller) -> int:
        """Number of a new session.

        Raises:
            SessionUnavailable: the number that was asked for cannot be had.
        """
        ...

    def left(self, guest: Guest) -> None:
        """A session has ended."""
        ...

    def done(self, caller: Caller, context: Context, what: str, details: dict[str, Any], result: str) -> None:
        """A call of theirs ended so; for the record."""
        ...


class LocalGate:
    """Engines of this host: whoever may open the socket and lock a file in the arena's folder.

    Args:
        folder: of the arena.
        salt: of their keys; empty for none.

    Attributes:
        gone: sessions that have ended and whose lock file may still be there.
    """

    open_calls = True

    def __init__(self, folder: Path, salt: bytes = b"") -> None:
        self._folder, self._salt = folder, salt
        self.gone: set[int] = set()

    def caller(self, context: Context) -> Caller:
        return ENGINE

    def calling(self, caller: Caller) -> AbstractContextManager[None]:
        return nullcontext()

    def welcome(self, caller: Caller) -> pb.Welcome:
        return pb.Welcome(arena=str(self._folder), salt=self._salt)

    def seat(self, asked: int, caller: Caller) -> int:
        if asked not in SESSIONS:
            raise SessionUnavailable(f"session number {asked} cannot be used; attach with another one")
        if is_free(client_lock(self._folder, asked)):
            raise ProtocolMismatch(f"session {asked} holds no lock on {client_lock(self._folder, asked)}")
        return asked

    def left(self, guest: Guest) -> None:
        self.gone.add(guest.session)

    def done(self, caller: Caller, context: Context, what: str, details: dict[str, Any], result: str) -> None:
        pass


class RemoteGate:
    """Whoever has a token.

    Args:
        hierarchy: of the host.
        register: who has one.
        audit: where admin calls are written down.

    Attributes:
        bulk: port of the bulk service.
        on_left: who else wants to hear of sessions that have ended.
    """

    open_calls = False

    def __init__(self, hierarchy: Hierarchy, register: Register, audit: AuditLog) -> None:
        self._hierarchy, self._register, self._audit = hierarchy, register, audit
        self.bulk = 0
        self._refusals = Refusals()
        self.on_left: Callable[[Guest], None] = lambda _: None

    def caller(self, context: Context) -> Caller:
        metadata = context.invocation_metadata() or ()
        return self._register.caller(bearer((name, value) for name, value in metadata))

    @contextmanager
    def calling(self, caller: Caller) -> Iterator[None]:
        tenant = caller.tenant
        if tenant is None:
            raise Unauthenticated("a remote caller belongs to a tenant")
        with tenant.calling():
            yield

    def welcome(self, caller: Caller) -> pb.Welcome:
        tenant = caller.tenant
        return pb.Welcome(salt=tenant.salt, tenant=tenant.name, bulk=self.bulk) if tenant else pb.Welcome()

    def seat(self, asked: int, caller: Caller) -> int:
        taken = self._hierarchy.state.ledger.sessions
        number = next(n for n in iter(lambda: SESSIONS.start + secrets.randbelow(len(SESSIONS)), 0) if n not in taken)
        if caller.tenant is not None:
            caller.tenant.enter(number)
        return number

    def left(self, guest: Guest) -> None:
        if guest.caller.tenant is not None:
            guest.caller.tenant.sessions.discard(guest.session)
        self.on_left(guest)

    def done(self, caller: Caller, context: Context, what: str, details: dict[str, Any], result: str) -> None:
        tenant = caller.tenant.name if caller.tenant else ""
        if not caller.admin and not self._refusals.one_more(tenant):
            return
        line = {"who": caller.name, "tenant": tenant, "peer": context.peer(), "what": what, "result": result, **details}
        try:
            self._audit.write(**line)
        except OSError as exc:  # it is done already, and the caller must hear so
            _log.error("audit log not written error=%s line=%r", exc, line)

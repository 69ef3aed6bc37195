"""The way to a host: found again whenever it was lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import grpc

from kvtier.client.attachment import Attachment
from kvtier.client.backoff import Backoff
from kvtier.client.way import Memory, Way
from kvtier.errors import ClosedError, DeadlineExceeded, SessionError, SessionUnavailable, Unauthenticated, UsageError
from kvtier.rpc.channel import ENDS_SESSION, code_of, error_of
from kvtier.rpc.kvtier_pb2 import Claim, ClientNote, Welcome
from kvtier.rpc.kvtier_pb2_grpc import DoorStub

Q = TypeVar("Q")
A = TypeVar("A")

CLOSING = 1.0
"""Seconds that a host may take to notice that a session is closed."""


class Line:
    """A channel to one door, the attachment on it, and the memory behind it. Thread-safe.

    Args:
        way: how the host is reached.
        timeout: seconds that attaching may take at first.
        clock: monotonic seconds.

    Attributes:
        where: the door, for people.
        stub: the calls.
        mapping: where slots are read and written.
        epoch: changes with each attachment.
        salt: of the tenant.
        tickets: reservations that may still be written into, by number, with the attachment that they were made on. The
            mapping is not replaced and the attachment's lock does not fall while one is here.
    """

    def __init__(self, way: Way, timeout: float, clock: Callable[[], float]) -> None:
        self.where = way.where
        self._way = way
        self._timeout = timeout
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._attaching = threading.Lock()
        self._backoff = Backoff(clock)
        self._channel = way.open()
        self.stub = DoorStub(self._channel)
        self.tickets: dict[int, Attachment] = {}
        self._claims: dict[bytes, None] = {}
        self.epoch = 0
        self.salt: str | None = None
        self.mapping: Memory
        try:
            self._at = self._attach(clock() + timeout)
        except BaseException:
            self._channel.close()
            raise

    def attached(self, until: float) -> Attachment:
        """The current attachment; made anew when it was lost.

        Raises:
            SessionUnavailable, DeadlineExceeded: nobody answers; at once while the last failure is fresh.
            UsageError: closed, or in a forked child.
        """
        if os.getpid() != self._pid:
            raise UsageError("this session was opened before a fork; open one in the child (gRPC does not survive it)")
        self._backoff.check()
        if self._at.lost and not self._closed:
            self._attach_again(until)
        if self._closed:
            raise ClosedError("this session is closed")
        return self._at

    def ask(self, method: grpc.UnaryUnaryMultiCallable[Q, A], request: Q, until: float, at: Attachment) -> A:
        """Make one call.

        Raises:
            SessionError: whatever became of it.
        """
        try:
            reply = method(request, timeout=max(0.0, until - self._clock()), metadata=self._way.metadata)
        except grpc.RpcError as exc:
            error = error_of(exc, self.where)
            if code_of(exc) in ENDS_SESSION:
                at.lose()
            elif isinstance(error, DeadlineExceeded):
                self._backoff.failed(error)
            raise error from exc
        except ValueError as exc:  # what gRPC says of a channel that another thread closed
            raise ClosedError("this session was closed") from exc
        self._backoff.worked()
        return reply

    def begin(self, method: grpc.UnaryUnaryMultiCallable[Q, A], request: Q, timeout: float) -> grpc.Future[A]:
        """Make one call whose answer is waited for elsewhere."""
        return method.future(request, timeout=timeout, metadata=self._way.metadata)

    def note(self, note: ClientNote) -> None:
        """Say something that needs no answer; nothing happens where nobody listens."""
        if os.getpid() == self._pid:
            self._at.note(note)

    def claim(self, keyspace: bytes) -> None:
        """Tell the host, and every later life of it, that this keyspace is used; only where keys are salted."""
        with self._attaching:
            if self.salt and keyspace not in self._claims:
                self._claims[keyspace] = None
                self.note(ClientNote(claim=Claim(keyspace=keyspace)))

    def close(self) -> None:
        """Hang up; idempotent."""
        with self._attaching:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._at.close(min(self._timeout, CLOSING))
            self._channel.close()
            self.mapping.close()

    def _attach_again(self, until: float) -> None:
        if not self._attaching.acquire(timeout=max(0.0, until - self._clock())):
            raise DeadlineExceeded(f"attaching again to the host at {self.where} takes too long")
        try:
            if self._at.lost and not self._closed:
                self._backoff.check()
                self._at = self._attach(until)
        finally:
            self._attaching.release()

    def _attach(self, until: float) -> Attachment:
        at = Attachment(self.stub, self.where, self._way.metadata)
        try:
            welcome = at.greet(until - self._clock())
            self._salted(welcome.salt.hex())
            self._map(welcome)
            at.join(self._way.presence(welcome), until - self._clock())
        except BaseException as exc:
            at.lose()
            if isinstance(exc, SessionError):
                self._backoff.failed(exc)
            raise
        for keyspace in self._claims:
            at.note(ClientNote(claim=Claim(keyspace=keyspace)))
        self.mapping.begin(at.session)
        at.memory = self.mapping
        self._backoff.worked()
        self.epoch = welcome.epoch << 32 | at.session
        return at

    def _salted(self, salt: str) -> None:
        """Note the tenant's salt; keys that were made with another one would find nothing."""
        if self.salt is None:
            self.salt = salt
        elif salt != self.salt:
            raise Unauthenticated(f"the host at {self.where} has another salt for this tenant; connect anew")

    def _map(self, welcome: Welcome) -> None:
        """Open the memory behind the door, unless it is open."""
        known = getattr(self, "mapping", None)
        if known is not None and known.is_of(welcome):
            return
        if self.tickets:
            raise SessionUnavailable(
                f"the host at {self.where} has a new arena; {len(self.tickets)} saves into the old one must end first"
            )
        self.mapping = self._way.memory(welcome)
        if known is not None:
            known.close()

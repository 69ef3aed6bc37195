"""One life of a session: its stream."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import grpc

from kvtier.client.presence import Presence
from kvtier.client.way import Memory, Metadata
from kvtier.errors import DeadlineExceeded, ProtocolMismatch, SessionUnavailable
from kvtier.rpc.channel import error_of
from kvtier.rpc.kvtier_pb2 import ClientNote, Hello, HostNote, Join, Welcome
from kvtier.rpc.kvtier_pb2_grpc import DoorStub
from kvtier.rpc.protocol import PROTOCOL


class Attachment:
    """An `Attach` stream, the lock that goes with it, and who still writes under that lock. Thread-safe.

    Made by `greet` and then `join`; when either fails, call `lose`.

    Attributes:
        lost: the stream has ended; everything that was granted on it is void.
        sent: notes sent on it.
        session: its number; 0 before `join`.
        memory: where its slots are read and written; set by who joins.
    """

    def __init__(self, stub: DoorStub, where: str, metadata: Metadata = ()) -> None:
        self._where = where
        self._notes: SimpleQueue[ClientNote | None] = SimpleQueue()
        self._presence: Presence | None = None
        self._writers = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.lost = False
        self.sent = 0
        self.session = 0
        self.memory: Memory
        self._stream = stub.Attach(iter(self._notes.get, None), metadata=metadata)

    def greet(self, timeout: float) -> Welcome:
        """Say who we are; the host says where its arena is.

        Raises:
            ProtocolMismatch: the host speaks another version.
            SessionUnavailable, DeadlineExceeded: it does not answer.
        """
        client = f"{Path(sys.argv[0]).name or 'python'} pid {os.getpid()}"
        welcome = self._exchange(ClientNote(hello=Hello(protocol=PROTOCOL, client=client)), timeout).welcome
        if welcome.protocol != PROTOCOL:
            raise ProtocolMismatch(
                f"the host at {self._where} speaks protocol {welcome.protocol}, this client {PROTOCOL}"
            )
        return welcome

    def join(self, presence: Presence | None, timeout: float) -> None:
        """Begin the session under this number; the lock is this attachment's from now on.

        Without one the host chooses a number.
        """
        self._presence = presence
        number = presence.session if presence is not None else 0
        joined = self._exchange(ClientNote(join=Join(session=number)), timeout).joined
        self.session = number or joined.session
        if not self._stream.add_callback(self._end):
            self._end()

    def note(self, note: ClientNote) -> None:
        """Say something that needs no answer; on a stream that has ended, nothing is said."""
        with self._lock:
            if not self.lost:
                self.sent += 1
                self._notes.put(note)

    def begin(self) -> bool:
        """Somebody may be writing into slots of this session until `end`; False when it is over already."""
        with self._lock:
            self._writers += not self.lost
            return not self.lost

    def end(self) -> None:
        """One that began writes no more."""
        with self._lock:
            self._writers -= 1
            self._let_go()

    def lose(self) -> None:
        """End it, whatever the host thinks; idempotent."""
        self._end()
        self._stream.cancel()

    def close(self, timeout: float) -> None:
        """End it in good order: the host has everything back when this returns."""
        with self._lock:
            self.lost = True
            self._let_go()
            self._notes.put(None)
        self._ended.wait(timeout)

    def _end(self) -> None:
        with self._lock:
            self.lost = True
            self._let_go()
            self._notes.put(None)
        self._ended.set()

    def _let_go(self) -> None:
        if self.lost and not self._writers and self._presence is not None:
            self._presence.close()
            self._presence = None

    def _exchange(self, note: ClientNote, timeout: float) -> HostNote:
        late = threading.Event()
        timer = threading.Timer(timeout, self._give_up, (late,))
        timer.daemon = True
        timer.start()
        self._notes.put(note)
        try:
            return next(self._stream)
        except grpc.RpcError as exc:
            if late.is_set():
                raise DeadlineExceeded(f"the host at {self._where} did not answer within {timeout:.3g} s") from exc
            raise error_of(exc, self._where) from exc
        except StopIteration:
            raise SessionUnavailable(f"the host at {self._where} ended the session before it began") from None
        finally:
            timer.cancel()

    def _give_up(self, late: threading.Event) -> None:
        late.set()
        self._stream.cancel()

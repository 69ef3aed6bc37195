"""Follows one host's events, without a hole that nobody notices."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

import msgspec
import zmq

from kvtier.errors import ProtocolMismatch, SessionError
from kvtier.events.asking import Asking
from kvtier.events.publisher import next_to
from kvtier.events.schema import AnyEvent, decode

RETRY = 0.5
"""Seconds between attempts to reach a publisher that does not answer."""
MANY = 256
"""Batches in an answer behind which there may be more."""
QUEUED = 10_000
"""Batches that may wait here while the caller is busy."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What happened on the host.

    Attributes:
        seq: its number.
        ts: when it was published, seconds since the epoch.
        events: in the order in which they happened.
        fresh: forget what was known of this host; what it has follows, in this batch and those behind it.
        missed: numbers before this one that are not to be had: batches that are lost, or another life of the host; only
            without dumps.
    """

    seq: int
    ts: float
    events: tuple[AnyEvent, ...]
    fresh: bool = False
    missed: int = 0


class _Need(Enum):
    NOTHING = 0
    BEGIN = 4
    """With what comes from now on."""
    CHECK = 1
    """Nothing was heard for a while."""
    REPLAY = 2
    """Some are missing."""
    DUMP = 3


class Subscriber:
    """Batches of one host in their order; what is missed is had again. For one thread.

    It begins with a dump of what the host has; without dumps, with what comes from now on, or from `since` on. When the
    publisher has been restarted, or what was missed is no longer kept, it begins again with a dump.

    Args:
        endpoint: of the publisher: "tcp://HOST:PORT" or "ipc://PATH".
        replay_endpoint: where it is asked for what was missed; by default the port after it.
        topic: beginning of the topics that are wanted.
        since: number of the first batch that is wanted, in place of a dump at the beginning.
        dump: whether dumps are had; else what is lost is said in `Batch.missed`.
        patience: seconds that the publisher may take for an answer.
        check: seconds of silence after which it is asked whether something was missed.

    Attributes:
        fault: why nothing comes; empty while all is well.

    Raises:
        ConfigError: what is no endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str = "",
        since: int | None = None,
        dump: bool = True,
        patience: float = 2.0,
        check: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fault = ""
        self._clock, self._check, self._dumps = clock, check, dump
        self._last = -1 if since is None else max(0, since) - 1
        self._live = -1
        """Number of the last that came by itself: those only grow while the publisher lives."""
        self._need = _Need.CHECK if since is not None else _Need.DUMP if dump else _Need.BEGIN
        self._token = b""
        self._missed, self._fresh = 0, False
        self._ready: deque[Batch] = deque()
        self._retry = self._heard = clock()
        replay_endpoint = replay_endpoint or next_to(endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.rcvhwm = QUEUED
        self._in.ipv6 = "[" in endpoint
        self._in.subscribe(topic)
        self._in.connect(endpoint)
        self._asking = Asking(self._context, replay_endpoint, patience)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        """Batches, without end; while the host is away, it waits."""
        while True:
            batch = self.receive(1.0)
            if batch is not None:
                yield batch

    @property
    def whole(self) -> bool:
        """Whether all that the host had when it was last heard of has been received."""
        return not self._ready and self._need in (_Need.NOTHING, _Need.CHECK)

    def receive(self, timeout: float) -> Batch | None:
        """The next batch; None when there was none in time (or, with a reason in `fault`, nobody answers).

        May take `patience` longer than `timeout` when something has to be asked for.

        Raises:
            ProtocolMismatch: what is published there is something else.
        """
        until = self._clock() + timeout
        while True:
            if self._ready:
                return self._ready.popleft()
            left = until - self._clock()
            if self._need is not _Need.NOTHING and self._clock() >= self._retry:
                self._catch_up()
            elif self._need not in (_Need.NOTHING, _Need.CHECK):  # what comes live waits until it can be understood
                time.sleep(max(0.0, min(left, self._retry - self._clock())))
            elif self._in.poll(int(max(0.0, min(left, self._check)) * 1000)):
                self._hear(self._in.recv_multipart())
            elif self._clock() >= self._heard + self._check and self._last >= 0:
                self._need, self._heard = _Need.CHECK, self._clock()
            if not self._ready and self._clock() >= until:
                return None

    def close(self) -> None:
        """Stop following; idempotent."""
        self._asking.close()
        self._in.close(linger=0)
        self._context.term()

    def _hear(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            raise ProtocolMismatch(f"a message of {len(frames)} frames is no batch of KV events")
        _, number, payload = frames
        seq = int.from_bytes(number, "big")
        again, self._live = seq <= self._live, seq
        self._heard, self.fault = self._clock(), ""
        if again:  # another life, on a host whose clock was set back
            self._lose(seq, fresh=True)
        elif 0 <= seq <= self._last:  # had by a replay already
            return
        elif 0 <= self._last < seq - 1:
            self._need = _Need.REPLAY
        if self._need in (_Need.NOTHING, _Need.CHECK):
            self._take(seq, payload)

    def _catch_up(self) -> None:
        """Do what is needed, or say why it cannot be done and wait a little."""
        try:
            if self._need is _Need.DUMP:
                self._take_part()
            elif self._need is _Need.BEGIN:
                self._last, self._need = self._asking.last(), _Need.NOTHING
            else:
                self._replay()
            self.fault = ""
        except SessionError as exc:
            if isinstance(exc, ProtocolMismatch):
                raise
            self.fault = str(exc)
            self._retry = self._clock() + RETRY
            self._token = b""

    def _replay(self) -> None:
        kept = self._asking.since(self._last + 1)
        heard, self._need = self._need is _Need.REPLAY, _Need.NOTHING if len(kept) < MANY else _Need.CHECK
        for seq, payload in kept:
            if seq != self._last + 1:
                self._lose(seq, missed=max(0, seq - self._last - 1), fresh=seq <= self._last)
                if self._need is _Need.DUMP:
                    return
            self._take(seq, payload)
        if heard and not kept and self._dumps:  # what was heard of is there no more
            self._need = _Need.DUMP

    def _lose(self, seq: int, *, missed: int = 0, fresh: bool = False) -> None:
        """What was before this one is not to be had."""
        if self._dumps:
            self._need = _Need.DUMP
        else:
            self._last, self._missed, self._fresh = seq - 1, missed, fresh

    def _take_part(self) -> None:
        begin = not self._token
        part = self._asking.part(self._token)
        if part is None:
            self._token = b""
            return
        seq, payload, self._token = part
        if begin:
            self._last, self._fresh = seq, True
        self._add(self._last, payload)
        if not self._token:
            self._need, self._heard = _Need.NOTHING, self._clock()

    def _take(self, seq: int, payload: bytes) -> None:
        self._last = seq
        self._add(seq, payload)

    def _add(self, seq: int, payload: bytes) -> None:
        try:
            said = decode(payload)
        except msgspec.DecodeError as exc:
            raise ProtocolMismatch(f"batch {seq} is no batch of KV events: {exc}") from exc
        self._ready.append(Batch(seq, said.ts, tuple(said.events), self._fresh, self._missed))
        self._fresh, self._missed = False, 0

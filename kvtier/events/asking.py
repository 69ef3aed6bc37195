"""Requests to a publisher's replay socket."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from kvtier.errors import ProtocolMismatch, SessionUnavailable

END = b"\xff" * 8
"""In place of a sequence number: there is no more."""
DUMP = b"dump"
"""Begins a request for a part of a dump; the token of the part before it follows."""
LAST = b"last"
"""Asks for the number of the last batch."""
REQUEST_NBYTES = 64


def numbered(number: int) -> bytes:
    """A sequence number as it travels."""
    return number.to_bytes(8, "big")


class Asking:
    """Asks one publisher, one request at a time. Not thread-safe.

    Args:
        context: of ZeroMQ.
        endpoint: of the publisher's replay socket.
        patience: seconds that each answer may take.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, patience: float) -> None:
        self._context, self._endpoint, self._patience = context, endpoint, patience
        self._socket: zmq.Socket[bytes] | None = None

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """Batches from this number on that the publisher still has, as (number, payload); some of them, if many.

        Raises:
            SessionUnavailable: nobody answers.
            ProtocolMismatch: what answers is no publisher of KV events.
        """
        found = []
        for frames in self._ask(numbered(number)):
            if len(frames) < 2 or len(frames[-2]) != len(END):
                raise self._mismatch(frames)
            if frames[-2] == END:
                break
            found.append((int.from_bytes(frames[-2], "big"), frames[-1]))
        return found

    def last(self) -> int:
        """Number of the last batch.

        Raises:
            SessionUnavailable: nobody answers.
            ProtocolMismatch: what answers cannot say it.
        """
        frames = next(self._ask(LAST))
        if len(frames) != 2 or len(frames[1]) != len(END):
            raise self._mismatch(frames)
        return int.from_bytes(frames[1], "big")

    def part(self, token: bytes) -> tuple[int, bytes, bytes] | None:
        """One part of a dump, as (number of the batch that it goes with, payload, token for the next; b"" for none).

        Args:
            token: of the part before it; b"" for the first.

        Returns:
            None when the publisher began anew meanwhile, and so must the dump.

        Raises:
            SessionUnavailable: nobody answers.
            ProtocolMismatch: what answers has no dumps.
        """
        frames = next(self._ask(DUMP + token))
        if len(frames) != 4 or len(frames[1]) != len(END):
            raise self._mismatch(frames)
        _, number, payload, following = frames
        return None if number == END else (int.from_bytes(number, "big"), payload, following)

    def close(self) -> None:
        """Forget what was asked; idempotent."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(linger=0)

    def _ask(self, request: bytes) -> Iterator[list[bytes]]:
        """Answers to a request; a socket that was not answered on is not used again, lest an answer come late."""
        socket = self._socket
        if socket is None:
            socket = self._socket = self._context.socket(zmq.DEALER)
            socket.connect(self._endpoint)
        socket.send_multipart((b"", request))
        while socket.poll(int(self._patience * 1000)):
            yield socket.recv_multipart()[1:]
        self.close()
        raise SessionUnavailable(f"nobody answers at {self._endpoint}; are events on there (events.endpoint)?")

    def _mismatch(self, frames: list[bytes]) -> ProtocolMismatch:
        self.close()
        return ProtocolMismatch(f"{self._endpoint} answered with {len(frames)} frames that are no KV events")

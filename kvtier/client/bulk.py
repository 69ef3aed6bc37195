"""Payloads to and from another host, by Arrow Flight."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import flight

from kvtier.client.credentials import Credentials
from kvtier.errors import DeadlineExceeded, SessionUnavailable, Unauthenticated
from kvtier.rpc.bulk import COLUMN, PIECE, POSITION, Ask
from kvtier.rpc.channel import BULK_OPTIONS
from kvtier.rpc.conversions import unpack_numbers

PATIENCE = 10.0
"""Seconds that a call may take besides the time for its bytes."""
SLOWEST = 8e6
"""Bytes a second below which a call is given up."""
SCHEMA = pa.schema([pa.field(COLUMN, pa.uint8(), nullable=False)])


class Bulk:
    """Bulk calls to one host. Thread-safe.

    Args:
        host: its name or address.
        port: of its bulk service.
        credentials: what proves who is who.

    Raises:
        SessionUnavailable: there can be no such port.
    """

    def __init__(self, host: str, port: int, credentials: Credentials) -> None:
        tls = credentials.tls
        place = f"{'grpc+tls' if tls else 'grpc'}://{host}:{port}"
        proof: dict[str, Any] = {"tls_root_certs": tls.roots} if tls else {}
        if tls and tls.cert:
            proof |= {"cert_chain": tls.cert, "private_key": tls.key}
        self._where = place
        self._headers = [(name.encode(), value.encode()) for name, value in credentials.metadata]
        with self._said():
            self._client = flight.FlightClient(place, generic_options=list(BULK_OPTIONS), **proof)

    def get(self, ask: Ask, nbytes: int) -> Generator[memoryview]:
        """The payloads of leased slots, in order and in pieces; fewer when some are gone.

        Raises:
            SessionError: the host does not give them.
        """
        with self._said():
            reader = self._client.do_get(flight.Ticket(ask.pack()), self._options(nbytes))
            try:
                while True:
                    try:
                        batch = reader.read_chunk().data
                    except StopIteration:
                        return
                    yield memoryview(batch.column(0).buffers()[1])[: batch.num_rows]
            finally:
                reader.cancel()

    def put(self, ask: Ask, payloads: Sequence[tuple[int, NDArray[np.uint8]]]) -> list[int]:
        """Send payloads for positions of a reservation; the positions that arrived whole.

        Raises:
            SessionError: the host does not take them.
        """
        nbytes = sum(payload.nbytes for _, payload in payloads)
        with self._said():
            descriptor = flight.FlightDescriptor.for_command(ask.pack())
            writer, reader = self._client.do_put(descriptor, SCHEMA, self._options(nbytes))
            with writer:
                for position, payload in payloads:
                    metadata = pa.py_buffer(POSITION.pack(position))
                    for start in range(0, payload.nbytes, PIECE):
                        piece = payload[start : start + PIECE]
                        column = pa.Array.from_buffers(pa.uint8(), piece.nbytes, [None, pa.py_buffer(piece)])
                        writer.write_with_metadata(pa.RecordBatch.from_arrays([column], schema=SCHEMA), metadata)
                writer.done_writing()
                answer = reader.read()
                return unpack_numbers(answer.to_pybytes()) if answer is not None else []

    def close(self) -> None:
        """Hang up; idempotent."""
        self._client.close()

    def _options(self, nbytes: int) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=PATIENCE + nbytes / SLOWEST, headers=self._headers)

    @contextmanager
    def _said(self) -> Iterator[None]:
        """What Flight raises, in kvtier's words."""
        try:
            yield
        except flight.FlightTimedOutError as exc:
            raise DeadlineExceeded(f"the host at {self._where} did not answer in time") from exc
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError) as exc:
            raise Unauthenticated(f"the host at {self._where} says: {exc}") from exc
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            raise SessionUnavailable(f"the host at {self._where} failed: {exc}") from exc

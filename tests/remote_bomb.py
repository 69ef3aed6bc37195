"""A host with a remote door, and what it is sent by a child: a payload that swells. Says what came of it, as JSON."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ZEROS = 1536 << 20


def host() -> None:
    from kvtier.memory.arena import Arena
    from kvtier.testing.session import CAPACITY, found, host_over, reserve, save
    from tests.remote_fixture import remote_door

    with host_over(Arena.private(CAPACITY)) as one, remote_door(one.hierarchy, Path(tempfile.mkdtemp())) as remote:
        token = remote.add("kit", admin=True)
        session = remote.session(token)
        save(session, 0, 1)
        reserved = reserve(session, 10, 1)
        before = _peak()
        what = [remote.door.bulk_port, session._line._at.session, reserved.ticket]
        child = [sys.executable, "-m", "tests.remote_bomb", *map(str, what)]
        said = subprocess.run(child, input=token, text=True, capture_output=True, timeout=90.0, check=True)
        grown = _peak() - before
        save(session, 20, 1)
        answer = {"said": said.stdout.strip(), "grown_nbytes": grown, "saved": found(session, 20, 1)}
        sys.stdout.write(f"{json.dumps(answer)}\n")
        session.close()


def send(port: int, session: int, call: int, token: str) -> None:
    import numpy as np
    import pyarrow as pa
    from pyarrow import flight

    from kvtier.rpc.bulk import COLUMN, POSITION, Ask

    schema = pa.schema([pa.field(COLUMN, pa.uint8(), nullable=False)])
    zeros = pa.Array.from_buffers(pa.uint8(), ZEROS, [None, pa.py_buffer(np.zeros(ZEROS, np.uint8))])
    options = flight.FlightCallOptions(
        headers=[(b"authorization", f"Bearer {token}".encode())],
        write_options=pa.ipc.IpcWriteOptions(compression="zstd"),
    )
    client = flight.FlightClient(f"grpc://127.0.0.1:{port}")
    descriptor = flight.FlightDescriptor.for_command(Ask(session, call).pack())
    writer, reader = client.do_put(descriptor, schema, options)
    try:
        batch = pa.RecordBatch.from_arrays([zeros], schema=schema)
        writer.write_with_metadata(batch, pa.py_buffer(POSITION.pack(0)))
        writer.done_writing()
        reader.read()
        writer.close()
    except (flight.FlightError, pa.ArrowException) as exc:
        sys.stdout.write(f"refused: {exc}".splitlines()[0])
    else:
        sys.stdout.write("taken")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    if sys.argv[1:]:
        send(*map(int, sys.argv[1:]), sys.stdin.read())
    else:
        host()

"""What a client on another host pays, against one on the host itself.

The same loads and saves of bf16 KV, 256 MiB of it, through the remote door over loopback (control by gRPC, bulk by
Arrow Flight) and through the host's own door, in turn; as plain text, and with TLS where there is `openssl` to make a
certificate with. Client and host share the machine's cores, so the network's share is the least that it can be. A load
verifies the checksum of every block that came; both ends of a save do.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import kvtier
from benchmarks._blocks import SPECS, TOTAL, kv_tensor
from benchmarks._harness import Figure, emit, options, paired
from benchmarks._host import host
from kvtier_services.gateway import tokens


def measure(total: int, rounds: int) -> Iterator[Figure]:
    """Both block sizes, with and without TLS."""
    torch.set_num_threads(1)
    for tls in (False, True) if shutil.which("openssl") else (False,):
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as run:
            folder = Path(run)
            token = tokens.add(folder / "tokens.json", "bench", admin=True)
            if tls:
                _certify(folder)
            with host(6 * total, remote=folder) as socket:
                url = f"grpc{'s' if tls else ''}://127.0.0.1:{(folder / 'port').read_text()}"
                ca = folder / "host.pem" if tls else None
                with kvtier.connect(socket) as near, kvtier.connect(url, token=token, ca=ca) as far:
                    yield from _figures(near, far, total, rounds, "tls" if tls else "plain")


def _figures(near: kvtier.Cache, far: kvtier.Cache, total: int, rounds: int, how: str) -> Iterator[Figure]:
    for size, spec in SPECS.items():
        for plan in ("raw", "int8"):
            spaces = [cache.keyspace(spec, model="bench", revision="1", plan=plan) for cache in (near, far)]
            kv = kv_tensor(spec, total)
            numbers = itertools.count()

            def save(space: kvtier.Space, kv: torch.Tensor = kv, numbers: Iterator[int] = numbers) -> object:
                tokens_ = kv.shape[2]
                chain = space.chain(np.arange(tokens_, dtype=np.uint32) + next(numbers) * tokens_)
                saved = space.save(chain, kv).result()
                if saved.refused:
                    raise RuntimeError(f"a save was refused: {saved}")
                return chain

            chains = [save(space) for space in spaces]

            def load(at: int, kv: torch.Tensor = kv, spaces: list = spaces, chains: list = chains) -> None:
                with spaces[at].match(chains[at]) as hit:
                    if hit.load(kv) != kv.shape[2]:
                        raise RuntimeError("a load was not whole")

            for what, do in (("load", load), ("save", lambda at, save=save, spaces=spaces: save(spaces[at]))):
                ratio = paired(lambda do=do: do(0), {what: lambda do=do: do(1)}, rounds=rounds, warmups=1)[what]
                yield ratio.figure(
                    f"remote.{what}.{how}.{plan}.{size}",
                    "ratio to the host's own door",
                    logical_gbps=round(total / ratio.seconds / 1e9, 2),
                    near_gbps=round(total / ratio.baseline_seconds / 1e9, 2),
                )
            spaces[0].clear()
            spaces[1].clear()


def _certify(folder: Path) -> None:
    """A certificate that vouches for itself."""
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    new += ["-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1"]
    new += ["-keyout", str(folder / "host.key"), "-out", str(folder / "host.pem")]
    subprocess.run(new, check=True, capture_output=True)


if __name__ == "__main__":
    args = options(__doc__)
    emit(measure(64 << 20, 2) if args.smoke else measure(TOTAL, 9), as_json=args.json)

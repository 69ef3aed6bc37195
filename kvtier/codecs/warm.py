"""Compile every kernel before the first load needs it: `python -m kvtier.codecs.warm`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def warm() -> Path | None:
    """Compile all kernels, or load them from the cache; cheap when this process has them already.

    Returns:
        The folder that keeps them, or None when no folder can be written and every process compiles anew.
    """
    from kvtier.codecs.cpu import codec, drop, jit

    del codec, drop
    return jit.CACHE_FOLDER


def main() -> int:
    """Warm, and say where the kernels are and how long it took."""
    start = time.perf_counter()
    # The two kernels are compiled at the same time: the compiler holds a lock within a process.
    beside = subprocess.Popen([sys.executable, "-c", "import kvtier.codecs.cpu.decode"])
    import kvtier.codecs.cpu.encode  # noqa: F401

    beside.wait()
    folder = warm()
    took = time.perf_counter() - start
    where = f"kept in {folder}" if folder else "not kept: no folder can be written; set NUMBA_CACHE_DIR"
    sys.stdout.write(f"kernels ready in {took:.2f} s, {where}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

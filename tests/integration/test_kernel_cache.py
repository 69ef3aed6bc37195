"""What a process finds of the kernels that another compiled."""

import os
import subprocess
import sys
from pathlib import Path

from kvtier.codecs.cpu import jit

ROOT = Path(jit.__file__).parents[2]

SCRIPT = """
import pathlib
from kvtier.codecs.cpu import jit
{setup}
import numpy as np
from kvtier.codecs.warm import main, warm
from kvtier.codecs.registry import codec_for
from kvtier.codecs.view import KVView
from kvtier.spec import KVSpec
main()
spec, codec, at = KVSpec(1, 1, 4, "float32", block_tokens=1), codec_for("int8"), np.array([0])
kv, memory = np.ones((1, 2, 1, 1, 4), np.float32), np.zeros(codec.nbytes(spec, 0), np.uint8)
print(codec.encode(spec, KVView.of(kv, spec), at, memory, at, range(1)))
"""


def run(setup: str, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(setup=setup)],
        env=kept | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


def test_where_nothing_can_be_written_kernels_work_uncached() -> None:
    # root may write anywhere, so the folders are taken away instead of made read-only
    out = run("jit.CACHE_FOLDER = None")
    assert "not kept" in out
    assert "[ True]" in out


def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    first = run("", NUMBA_CACHE_DIR=str(tmp_path))
    kept = sorted(tmp_path.rglob("*.nbc"))
    assert f"kept in {tmp_path}" in first
    assert len(kept) == 3, "one file a kernel: no kernel has a second specialisation"
    stamps = [file.stat().st_mtime_ns for file in kept]
    assert "[ True]" in run("", NUMBA_CACHE_DIR=str(tmp_path))
    assert [file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("*.nbc"))] == stamps

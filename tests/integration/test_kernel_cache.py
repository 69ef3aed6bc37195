"""What a process finds of the kernels that another compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier.codecs.warm import warm

ROOT = Path(kvtier.__file__).parents[1]

SCRIPT = """
from kvtier.codecs.cpu import jit
{setup}
import numpy as np
from kvtier.codecs.cpu.decode import decode_blocks
from kvtier.codecs.cpu.encode import encode_blocks
from kvtier.codecs.registry import codec_for
from kvtier.codecs.view import KVView
from kvtier.codecs.warm import warm
from kvtier.spec import KVSpec
print("kept in", warm())
spec, at = KVSpec(1, 1, 4, "float32", block_tokens=1), np.array([0])
codec, kv = codec_for("int8", spec), np.ones((1, 2, 1, 1, 4), np.float32)
memory = np.zeros(codec.nbytes(0), np.uint8)
print(codec.encode(KVView.of(kv, spec), at, memory, at, at, range(1)))
for kernel in (encode_blocks, decode_blocks):
    print("hits", sum(kernel.stats.cache_hits.values()), "misses", sum(kernel.stats.cache_misses.values()))
"""


def run(setup: str, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in ("XDG_CACHE_HOME", "HOME")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(setup=setup)],
        env=kept | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout


def kernels(folder: Path) -> dict[Path, int]:
    """Files of machine code, and when each was written."""
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*.nbc")}


def test_a_second_process_finds_what_this_one_compiled() -> None:
    folder = warm()
    before = kernels(folder)
    out = run("")
    assert f"kept in {folder}" in out
    assert "[ True]" in out
    assert out.count("hits 1 misses 0") == 2
    assert kernels(folder) == before


@pytest.mark.slow
def test_an_empty_folder_is_filled_once(tmp_path: Path) -> None:
    empty = f"from pathlib import Path; jit.CACHE_FOLDER = Path({str(tmp_path)!r})"  # that no other is copied into
    out = run(empty)
    assert f"kept in {tmp_path}" in out
    assert out.count("hits 0 misses 1") == 2
    before = kernels(tmp_path)
    names = sorted(file.name.partition("-")[0] for file in before)
    assert names == ["decode.decode_blocks", "drop.drop_tokens", "encode.encode_blocks"], "none has a second variant"
    assert run(empty).count("hits 1 misses 0") == 2
    assert kernels(tmp_path) == before


def test_an_empty_folder_gets_what_is_kept_beside_the_package(tmp_path: Path) -> None:
    warm()
    out = run("", NUMBA_CACHE_DIR=str(tmp_path))
    assert f"kept in {tmp_path}" in out
    assert out.count("hits 1 misses 0") == 2
    assert kernels(tmp_path)


@pytest.mark.slow
def test_where_nothing_can_be_written_kernels_work_uncached() -> None:
    # root may write anywhere, so the folders are taken away instead of made read-only
    out = run("jit.CACHE_FOLDER = None")
    assert "kept in None" in out
    assert "[ True]" in out
    assert out.count("hits 0 misses 1") == 2


@pytest.mark.slow
def test_bodies_are_the_same_on_a_cpu_that_can_do_less(tmp_path: Path) -> None:
    """All kernels are held to the specification again, compiled for the least CPU of this architecture."""
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    tests = [
        f"tests/{name}.py" for name in ("property/test_codecs", "unit/codecs/test_packing", "unit/codecs/test_scales")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=os.environ | generic,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]

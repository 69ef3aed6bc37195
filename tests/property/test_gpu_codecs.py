"""The GPU's codec in Triton's interpreter, and what its kernels compile to, on machines that have no GPU.

Each in a process of its own: Triton decides once, at its import, whether it compiles or interprets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'kvtier[gpu]', on Linux"
)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_laws_of_tests_gpu_hold_in_the_interpreter() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


def test_kernels_compile_and_round_every_operation(tmp_path: Path) -> None:
    """For a GPU that is not here: nothing fused, nothing flushed to zero, nothing approximate; whole words moved."""
    done = run("-m", "tests.gpu.compiled", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-20_000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["name"] for kernel in kernels} == {"copy", "decode", "encode_rows", "encode_shared"}
    for kernel in kernels:
        instructions = kernel["instructions"]
        assert not [each for each in instructions if "fma" in each or "ftz" in each or "approx" in each], kernel["name"]
        assert "div.full.f32" not in instructions
        # 8 elements of the KV at a time.
        assert "ld.global.v4.b32" in instructions
        assert "st.global.v4.b32" in instructions

"""Make the generated code: `python -m kvtier.rpc.generate` (for developers; needs the `dev` extra)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROTO = "kvtier/rpc/kvtier.proto"
NAMES = ("kvtier_pb2.py", "kvtier_pb2.pyi", "kvtier_pb2_grpc.py", "kvtier_pb2_grpc.pyi")

_GUARDS = (
    re.compile(r"^from google\.protobuf import runtime_version.*\n", re.MULTILINE),
    re.compile(r"^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?: .*\n)*\)\n", re.MULTILINE),
    re.compile(r"^# Protobuf Python Version: .*\n", re.MULTILINE),
    re.compile(r"^import warnings\n", re.MULTILINE),
    re.compile(r"^GRPC_GENERATED_VERSION = (?:.*\n)*?    \)\n", re.MULTILINE),
    re.compile(r"^GRPC(?:_GENERATED)?_VERSION: str\n", re.MULTILINE),
)
"""Checks that refuse every runtime older than the generator. What is generated uses nothing that the oldest releases in
`pyproject.toml` lack, and an engine next to us may pin one of those."""


def generate() -> dict[str, str]:
    """Text of each generated file, by name."""
    with tempfile.TemporaryDirectory() as out:
        kinds = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *kinds, PROTO]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "PATH": path})  # noqa: S603
        return {name: _without_guards((Path(out, PROTO).parent / name).read_text()) for name in NAMES}


def _without_guards(text: str) -> str:
    for guard in _GUARDS:
        text = guard.sub("", text)
    return text


if __name__ == "__main__":
    for name, text in generate().items():
        (HERE / name).write_text(text)

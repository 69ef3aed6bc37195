"""The laws of the GPU's codec: on a device, or on the CPU in Triton's interpreter when `TRITON_INTERPRET=1`.

`tests/property/test_gpu_codecs.py` runs them in the interpreter, in a process of its own, because Triton decides at its
import; `run.sh` on a device. Elsewhere they are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and not INTERPRETED:
            item.add_marker("gpu")

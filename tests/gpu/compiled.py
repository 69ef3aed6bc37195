"""Compiles kernels for a GPU on a machine that has none, and prints of each the instructions that it has."""

from __future__ import annotations

import json
import re
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from kvtier.codecs.gpu import DeviceView, GpuCodec, codec, view
from kvtier.spec import KVSpec

SPEC = KVSpec(1, 2, 128, "bfloat16")
PLAN = "sinks:1(K=int8/channel:64/asym,V=int4/token/sym/hadamard/lloyd)"
"""Both granularities, both ways; a rotation, ordered sums and exact tokens."""


class Absent(DriverBase):
    """Stands for a device that kernels are compiled for and never run on."""

    def __init__(self) -> None:
        pass

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, _type: str) -> str:
        return ""

    def get_benchmarker(self) -> Any:
        return None


def compiled(kernel: Any, grid: Any, *arguments: Any) -> None:
    """In place of `codec.launch`."""
    code = kernel.warmup(*arguments, grid=grid, enable_fp_fusion=False).asm["ptx"]
    instructions = sorted(set(re.findall(r"^\s*(?:@%p\d+ )?([a-z]+\.[\w.]+)", code, re.MULTILINE)))
    sys.stdout.write(json.dumps({"name": kernel.fn.__name__, "instructions": instructions}) + "\n")


def main() -> None:
    driver.set_active(Absent())
    none = np.array([0])
    with patch.object(view, "INTERPRETED", True), patch.object(codec, "launch", compiled):
        here = GpuCodec(PLAN, SPEC, "cpu")
        pools = [tuple(torch.zeros(2, 4, 16, 2, 128, dtype=torch.bfloat16))]
        kv = DeviceView.paged(pools, [0, 1, 2, 3], SPEC)
        memory = torch.zeros(here.nbytes(0), dtype=torch.uint8)
        here.encode(kv, none, memory, none, none, range(1))
        here.decode(memory, none, none, kv, none, range(1))


if __name__ == "__main__":
    main()

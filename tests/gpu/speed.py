"""How fast the GPU's codec is on a device, as a share of what copying the same KV there takes.

One JSON line a figure: `gpu.decode.PLAN` and `gpu.encode.PLAN` are the time of the copy over the time of the kernels,
so that 1 is as fast as a copy. What is stored is smaller than the KV, so that a decode may be faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import numpy as np
import torch
import triton

from kvtier.codecs.gpu import DeviceView, GpuCodec
from kvtier.codecs.plan import NAMED
from kvtier.spec import KVSpec
from tests.gpu.kit import DEVICE, PAGE_TOKENS

SPEC = KVSpec(32, 8, 128, "bfloat16")
"""Llama 3.1 8B."""
BLOCKS = 32
"""2,048 tokens: 256 MiB."""


def milliseconds(work: Callable[[], object]) -> float:
    """The median of many runs, each with a cold cache."""
    return float(triton.testing.do_bench(work, return_mode="median"))


def report(figure: str, copied: float, spent: float) -> None:
    nbytes = SPEC.block_nbytes * BLOCKS
    line = {
        "figure": figure,
        "value": round(copied / spent, 3),
        "unit": "of the speed of a device copy",
        "better": "higher",
        "ms": round(spent, 4),
        "copy_ms": round(copied, 4),
        "kv_gb_per_s": round(nbytes / spent / 1e6, 1),
        "device": torch.cuda.get_device_name(),
    }
    sys.stdout.write(json.dumps(line) + "\n")


def measure(plan: str, kv: DeviceView, copied: float) -> None:
    codec = GpuCodec(plan, SPEC, DEVICE)
    size = -(-codec.nbytes(0) // 4096) * 4096
    memory = torch.zeros(size * BLOCKS, dtype=torch.uint8, device=DEVICE)
    numbers = np.arange(BLOCKS)
    where = numbers * SPEC.block_tokens, memory, numbers * size, numbers
    every = range(SPEC.layers)
    if not codec.encode(kv, *where, every).all():
        raise RuntimeError(f"{plan}: normal values cannot be stored")
    report(f"gpu.encode.{plan}", copied, milliseconds(lambda: codec.encode(kv, *where, every)))
    tokens, _, offsets, positions = where
    report(
        f"gpu.decode.{plan}", copied, milliseconds(lambda: codec.decode(memory, offsets, positions, kv, tokens, every))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="*", default=[plan for plan in NAMED if plan != "mixed"])
    plans = parser.parse_args().plans
    torch.manual_seed(0)
    tokens = BLOCKS * SPEC.block_tokens
    pages = torch.randperm(tokens // PAGE_TOKENS)
    shape = (2, len(pages), PAGE_TOKENS, SPEC.kv_heads, SPEC.head_dim)
    pools = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(SPEC.layers)]
    kv = DeviceView.paged([(pool[0], pool[1]) for pool in pools], pages, SPEC)
    source = torch.empty(SPEC.block_nbytes * BLOCKS, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copied = milliseconds(lambda: target.copy_(source))
    for plan in plans:
        measure(plan, kv, copied)


if __name__ == "__main__":
    main()

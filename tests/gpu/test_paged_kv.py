"""kvtier's own pages on a device: blocks are encoded out of them and decoded into them where they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtier.codecs.gpu import DeviceView
from kvtier.pages import PagedKV
from kvtier.spec import KVSpec
from kvtier.testing.kv import random_kv
from tests.gpu.kit import DEVICE, Tensors, arrays, decode, decoded_on_cpu, encoded, encoded_on_cpu, tensors

SPEC = KVSpec(2, 2, 64, "bfloat16", v_head_dim=32, block_tokens=32)
LATENT = KVSpec(2, 1, 64, "bfloat16", block_tokens=32, mla=True)


def as_given(spec: KVSpec, layers: Tensors, first: int, end: int) -> list:
    cut = [[part[first:end] for part in layer] for layer in layers]
    return [layer[0][:, 0] if spec.mla else tuple(layer) for layer in cut]


@pytest.mark.parametrize("plan", ["raw", "int8"])
@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["unequal", "latent"])
def test_a_fork_is_encoded_and_decoded_in_its_pages(spec, plan):
    """Its last page is its own, though the sequence that it branched off from grew first; bodies are the CPU's."""
    kv = PagedKV(spec, 9, page_tokens=16, device=DEVICE)
    layers = random_kv(spec, 32)
    there = tensors(spec, layers)
    first = kv.tables.new()
    kv.append(first, as_given(spec, there, 0, 20))
    fork = kv.tables.fork(first)
    kv.append(first, as_given(spec, there, 0, 9))
    kv.append(fork, as_given(spec, there, 20, 32))
    memory, stored = encoded(plan, spec, DeviceView.paged(kv.pools, fork.pages, spec), [0], [0])
    assert stored.all()
    assert np.array_equal(memory, encoded_on_cpu(plan, spec, layers, [0], [0])[0])
    table = kv.tables.new()
    kv.tables.extend([(table, 32)])
    decode(plan, spec, memory, DeviceView.paged(kv.pools, table.pages, spec), [0], [0])
    wanted = decoded_on_cpu(plan, spec, memory, layers, [0], [0])
    for layer, expected in zip(arrays([list(parts) for parts in kv.gather(table)]), wanted, strict=True):
        for part, other in zip(layer, expected, strict=True):
            assert np.array_equal(part, other)
    rest = [[part[:9] for part in layer] for layer in there]
    for layer, expected in zip(kv.gather(first), rest, strict=True):
        for part, other in zip(layer, expected, strict=True):
            assert torch.equal(part[20:], other)

"""What the advisor computes is what the flow holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.advisor.footprint import Footprint, Storage
from kvtier.codecs.plan import canonical
from kvtier.connectors.transformers import spec_for
from kvtier.flow import Flow, parse_recipe

PROMPT, ANSWER = 900, 25


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "recipe", ["default", "split", "int4*snap_kv(0.5);every:10", "int8*h2o(0.7);recent:0.2;every:10", "k8v4;recent:0"]
)
def test_bytes_of_a_flow(model, recipe):
    """Between two prunings it holds up to `every` tokens more: `most` has them; `held` is right after a pruning."""
    known = parse_recipe(recipe)
    spec = replace(spec_for(model), dtype="bfloat16")
    layers = known.resolve(spec)
    storage = Storage(
        canonical(tuple(layer.plan for layer in layers)),
        tuple(layer.policy or 1.0 for layer in layers),
        recent=known.recent,
        page_tokens=1,
        every=known.every,
    )
    flow = Flow(model, recipe)
    flow.generate(torch.randint(0, 128, (1, PROMPT)), max_new_tokens=ANSWER, do_sample=False)
    report = flow.report
    flow.close()
    held, footprint = report.exact + report.aged + report.recent, Footprint(spec, storage)
    assert report.native == spec.token_nbytes * report.tokens
    assert 0.95 * footprint.held(report.tokens) <= held <= footprint.most(report.tokens)
    if not any(layer.policy for layer in layers):
        assert held == pytest.approx(footprint.held(report.tokens), rel=0.005)

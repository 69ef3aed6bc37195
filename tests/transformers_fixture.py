"""Tiny models of transformers, and their spaces."""

from __future__ import annotations

import torch
import transformers

from kvtier.connectors.transformers import space_for

# What is computed here is so little that threads would mostly wait for each other.
torch.set_num_threads(1)

BLOCK = 16
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}


def make(kind: str = "Llama", dtype: torch.dtype = torch.float32, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | {"num_key_value_heads": 2} | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


def space_of(cache, model, **parts):
    return space_for(cache, model, model_name="tiny", revision="0", block_tokens=BLOCK, **parts)


def words(seed: int, count: int) -> torch.Tensor:
    """Token ids that are not padding, `[count]`."""
    return torch.randint(1, 512, (count,), generator=torch.Generator().manual_seed(seed))


def plain(model, ids, tokens: int, mask=None) -> list[list[int]]:
    """What a model answers greedily without kvtier, row by row."""
    ids = torch.as_tensor(ids)
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return out[:, ids.shape[1] :].tolist()


def stored(space, ids) -> int:
    """Tokens of a sequence that are stored, from the first on."""
    found = [block is not None for block in space.inspect(torch.as_tensor(ids).reshape(-1))]
    return (found.index(False) if False in found else len(found)) * space.block_tokens


class Adapted(torch.nn.Linear):
    """A projection with a LoRA, as PEFT keeps it: it is switched and scaled in place."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.load_state_dict(base.state_dict())
        self._disable_adapters, self._active_adapter, self.scaling = False, ["a"], {"a": 1.0, "b": -1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 0.0 if self._disable_adapters else sum(self.scaling[name] for name in self._active_adapter)
        return super().forward(x) + scale * x[..., : self.out_features]


def adapted(model):
    """A model with LoRAs named "a" and "b", of which "a" is active."""
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    model.peft_config = {"a": {"r": 4}, "b": {"r": 4}}
    return model.eval()

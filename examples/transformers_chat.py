"""Chat over a document with any causal language model of transformers; its KV is computed once.

    python examples/transformers_chat.py MODEL [DOCUMENT]

MODEL is a name on the Hugging Face Hub or a folder. With `kvtier up` running, every process that asks about the same
document shares its KV, and a chat that was broken off goes on where it was; without, it is kept in this process.
"""

import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import kvtier
from kvtier.connectors.transformers import KVTierCache, space_for
from kvtier.errors import KVTierError, SessionError


def host() -> kvtier.Cache:
    """This host's kvtier, or one in this process."""
    try:
        return kvtier.connect()
    except SessionError as exc:
        print(f"({exc}; going on without)")
        return kvtier.open({"cpu": {"capacity": "1GiB"}})


def ask() -> str:
    """A question; empty at the end."""
    try:
        return input("\n> ").strip()
    except EOFError:
        return ""


def main() -> None:
    """Answer until an empty line."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name, file = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else __file__)
    try:
        document = file.read_text()
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name).eval()
    except (OSError, ValueError) as exc:
        raise SystemExit(f"cannot read {name} or {file}: {exc}") from None
    if tokenizer.chat_template is None:
        raise SystemExit(f"{name} is no chat model: its tokenizer has no chat template")
    messages = [{"role": "system", "content": f"Answer questions about this document.\n\n{document}"}]
    try:
        with host() as cache:
            chat = KVTierCache(model, space_for(cache, model, model_name=name, revision="main"), wait=5.0)
            while question := ask():
                messages.append({"role": "user", "content": question})
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                began = time.perf_counter()
                answer = model.generate(**chat.turn(ids), max_new_tokens=64, do_sample=False)
                text = tokenizer.decode(answer[0, len(ids) :], skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
                counts = f"{chat.kept:,} tokens kept, {chat.loaded:,} loaded, {chat.computed:,} computed"
                print(f"{text}\n({time.perf_counter() - began:.1f} s; {counts})")
    except KVTierError as exc:
        raise SystemExit(str(exc)) from None


if __name__ == "__main__":
    main()

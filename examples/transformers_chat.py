"""Chat over a document with any causal language model of transformers; its KV is computed once.

    python examples/transformers_chat.py MODEL [DOCUMENT]

MODEL is a name on the Hugging Face Hub or a folder. With `kvtier up` running, every process that asks about the same
document shares its KV; without, it is kept in this process and each turn reuses the one before.
"""

import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier
from kvtier.connectors.transformers import generate, space_for
from kvtier.errors import SessionError


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
    name, document = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else __file__).read_text()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    messages = [{"role": "system", "content": f"Answer questions about this document.\n\n{document}"}]
    with host() as cache:
        space = space_for(cache, model, model_name=name, revision="main", plan="raw")
        while question := ask():
            messages.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            began = time.perf_counter()
            answer = generate(model, ids, space, wait=5.0, max_new_tokens=64, do_sample=False)
            seconds = time.perf_counter() - began
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            print(f"{text}\n({seconds:.1f} s; {answer.loaded:,} tokens loaded, {answer.computed:,} computed)")


if __name__ == "__main__":
    main()

"""Ask vLLM about a document; its KV is computed by the first process that asks, and loaded by all others.

    python examples/vllm_offline.py MODEL [DOCUMENT]

MODEL is a name on the Hugging Face Hub or a folder. Run it twice, with `kvtier up` before; without, all is computed.
"""

import os
import sys
from pathlib import Path

# The engine in this process: its metrics can be read at the end, and it starts in half the time.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

KVTIER = KVTransferConfig(
    kv_connector="KVTierConnector", kv_connector_module_path="kvtier.connectors.vllm", kv_role="kv_both"
)
QUESTIONS = ("What is this document about?", "What does it leave open?")


def main() -> None:
    """Answer both questions."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    name, document = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else __file__).read_text()
    llm = LLM(name, kv_transfer_config=KVTIER, enforce_eager=True, disable_log_stats=False)
    for question in QUESTIONS:
        [output] = llm.generate(f"{document}\n\n{question}\n", SamplingParams(temperature=0, max_tokens=32))
        total = len(output.prompt_token_ids)
        print(
            f"{question}\n{output.outputs[0].text}\n({output.num_cached_tokens:,} of {total:,} tokens not computed)\n"
        )
    loaded = {m.name: m.value for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits"}
    print(f"loaded from kvtier: {sum(loaded.values()):,} tokens")


if __name__ == "__main__":
    main()

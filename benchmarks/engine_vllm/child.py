"""An engine in vLLM's environment: takes JSON lines, answers with JSON lines.

The first line: `model`, `target` (a host's socket, or null for no connector), `max_model_len`. Then `prompt` and
`tokens`, answered by `first` (seconds to the first token), `rest` (from then to the last) and `cached`; or `reset`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Engine:
    """One request at a time, timed where a step returns."""

    def __init__(self, model: str, target: str | None, max_model_len: int) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options: dict[str, Any] = {}
        if target is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KVTierConnector",
                kv_connector_module_path="kvtier.connectors.vllm",
                kv_role="kv_both",
                # Of a short prompt on a busy machine loading may take longer than computing; it is to be measured.
                kv_connector_extra_config={"target": target, "decline": False},
            )
        self._llm = LLM(
            model, max_model_len=max_model_len, block_size=32, enforce_eager=True, disable_log_stats=True, **options
        )
        self._engine = self._llm.llm_engine
        self._names = 0

    def reset(self) -> None:
        """Forget what vLLM keeps itself."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM still holds pages of requests that ended")

    def run(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """Answer a prompt with so many tokens."""
        from vllm import SamplingParams

        self._names += 1
        asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began, first, cached = time.perf_counter(), 0.0, 0
        self._engine.add_request(str(self._names), {"prompt_token_ids": prompt}, asked)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if not first and output.outputs[0].token_ids:
                    first, cached = time.perf_counter(), output.num_cached_tokens
                last = time.perf_counter()
        return {"first": first - began, "rest": last - first, "cached": cached}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes where it likes
    engine = Engine(**json.loads(sys.stdin.readline()))
    print(json.dumps({}), file=answers, flush=True)
    while line := sys.stdin.readline():
        asked = json.loads(line)
        answer = engine.reset() if asked.get("reset") else engine.run(**asked)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

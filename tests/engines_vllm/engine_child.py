"""A vLLM engine in a process of its own: takes commands out of a pipe, and puts the answers there.

A command is a dictionary: `do` is one of `Engine`'s methods, and the rest are its arguments.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

COUNTERS = (
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:num_preemptions",
)
BY_SOURCE = "vllm:prompt_tokens_by_source"


def prompt_of(tokens: list[int], salt: str | None) -> dict[str, Any]:
    return {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})


def told(output: Any) -> dict[str, Any]:
    """What a test may know of a finished request."""
    answer = output.outputs[0]
    return {
        "tokens": list(answer.token_ids),
        "cached": output.num_cached_tokens,
        "finish": answer.finish_reason,
        "first": getattr(output.metrics, "first_token_latency", None),
    }


class Engine:
    """What the commands do."""

    def __init__(self, adapters: dict[str, str] | None = None, **options: Any) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        if kv := options.pop("kv_transfer_config", None):
            from vllm.config import KVTransferConfig

            options["kv_transfer_config"] = KVTransferConfig(**kv)
        self._llm = LLM(**options)
        self._core = self._llm.llm_engine
        self._names = 0
        numbered = enumerate((adapters or {}).items(), 1)
        self._adapters = {name: LoRARequest(name, number, path) for number, (name, path) in numbered}

    def _sampling(self, max_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 24, salts: list[str] | None = None, adapter: str | None = None
    ) -> Any:
        """All prompts at the same time, to their ends."""
        asked = [prompt_of(tokens, salt) for tokens, salt in zip(prompts, salts or [None] * len(prompts), strict=True)]
        lora = {"lora_request": self._adapters[adapter]} if adapter else {}
        done = self._llm.generate(asked, self._sampling(max_tokens), use_tqdm=False, **lora)
        return [told(output) for output in done]

    def begin(self, prompts: list[list[int]], max_tokens: int = 24) -> Any:
        """Hand requests in; `step` and `finish` drive them. Their names."""
        names = []
        for tokens in prompts:
            self._names += 1
            names.append(f"request-{self._names}")
            self._core.add_request(names[-1], prompt_of(tokens, None), self._sampling(max_tokens))
        return names

    def step(self, count: int = 1) -> Any:
        """So many steps; the requests that finished meanwhile, by name."""
        finished = {}
        for _ in range(count):
            if self._core.has_unfinished_requests():
                finished |= {o.request_id: told(o) for o in self._core.step() if o.finished}
        return finished

    def abort(self, names: list[str]) -> None:
        """As when clients hang up."""
        self._core.abort_request(names)

    def finish(self) -> Any:
        """Step until all is done."""
        finished = {}
        while self._core.has_unfinished_requests():
            finished |= self.step()
        self._settle()
        return finished

    def reset(self) -> Any:
        """Forget the KV of finished requests in vLLM's own pool."""
        self._settle()
        return self._llm.reset_prefix_cache()

    def renew(self, running: bool = False) -> Any:
        """Forget it at once, without a step before; of what runs too, which begins anew."""
        return self._llm.reset_prefix_cache(reset_running_requests=running)

    def end(self) -> None:
        """As when the process ends; a forked one does not do so by itself."""
        self._core.engine_core.shutdown()

    def _settle(self) -> None:
        """Step until nothing is left to do, as an engine does that is a process of its own."""
        core = getattr(self._core.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            self._core.step()

    def metrics(self) -> Any:
        """The counters that tests compare."""
        found: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        for metric in self._llm.get_metrics():
            if metric.name in COUNTERS:
                found[metric.name] += metric.value
            elif metric.name == BY_SOURCE:
                source = f"{BY_SOURCE}.{metric.labels['source']}"
                found[source] = found.get(source, 0) + metric.value
        return found

    def series(self, prefix: str) -> Any:
        """All metrics whose name begins so: name, labels, value."""
        named = (metric for metric in self._llm.get_metrics() if metric.name.startswith(prefix))
        return [[metric.name, metric.labels, getattr(metric, "value", None)] for metric in named]

    def modules(self, names: list[str]) -> Any:
        """Which of these packages this process has imported."""
        return [name for name in names if name in sys.modules]

    def rates(self, prompt: list[int], max_tokens: int) -> Any:
        """Seconds to the first token, and from then to the last; one request."""
        import time

        [_], began, first = self.begin([prompt], max_tokens), time.perf_counter(), 0.0
        while self._core.has_unfinished_requests():
            outputs = self._core.step()
            if not first and any(o.outputs and o.outputs[0].token_ids for o in outputs):
                first = time.perf_counter()
        return [first - began, time.perf_counter() - first]


def serve(pipe: Any, log: Path, environment: dict[str, str], options: dict[str, Any]) -> None:
    """Be an engine's process: answer until the other end of the pipe is closed."""
    os.setsid()
    os.environ.update(environment)
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.register(signal.SIGUSR1)
    try:
        engine = Engine(**options)
        pipe.send({"value": os.getpid()})
        with suppress(EOFError):
            while command := pipe.recv():
                pipe.send({"value": getattr(engine, command.pop("do"))(**command)})
        engine.end()
    except Exception as exc:
        with suppress(OSError):
            pipe.send({"error": f"{type(exc).__name__}: {exc}"})
        raise

"""vLLM engines, as the tests drive them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines_vllm.engine_child import serve
from tests.engines_vllm.host import Host, eventually

PAGE = 32
BLOCK = 64
"""Tokens of vLLM's page on a CPU, and of the kvtier block that the connector makes of pages."""
EXTERNAL = "vllm:external_prefix_cache_"
KNOWN = "kvtier: the weights are"
SOURCES = "vllm:prompt_tokens_by_source."
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
}
PROCESSES = multiprocessing.get_context("forkserver")
"""Engines are forked from a process that has imported vLLM, which takes as long as all else that an engine does."""
PROCESSES.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"])
os.environ.update(ENVIRONMENT)
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 4096,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "block_size": PAGE,
    "max_num_seqs": 8,
    "disable_log_stats": False,
    "seed": 0,
}


def transfer(host: Host, role: str = "kv_both", policy: str | None = None, **extra: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for a host of kvtier."""
    config = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": role,
        # What is worth loading, and what comes too late, hangs on speed; here all is, and nothing does.
        "kv_connector_extra_config": {"target": str(host.patient), "wait": 10.0, "decline": False} | extra,
    }
    return config | ({"kv_load_failure_policy": policy} if policy else {})


class EngineError(Exception):
    """The engine's process said why it ended."""


@dataclass(frozen=True)
class Answer:
    """What came of one request.

    Attributes:
        tokens: that were generated.
        cached: prompt tokens that were not computed, as vLLM says.
        finish: why it ended.
        first: seconds to the first token.
    """

    tokens: list[int]
    cached: int
    finish: str
    first: float | None = None


class Engine:
    """An engine's process; the methods are those of `engine_child.Engine`."""

    def __init__(self, model: Path, log: Path, environment: dict[str, str] | None = None, **options: Any) -> None:
        self._log = log
        log.touch()
        self._pipe, theirs = PROCESSES.Pipe()
        asked = {"model": str(model), **OPTIONS, **options}
        self.process = PROCESSES.Process(target=serve, args=(theirs, log, environment or {}, asked))
        self.process.start()
        theirs.close()
        self._connected = "kv_transfer_config" in options

    def ready(self) -> Engine:
        """Wait until it is, and a connector knows the weights: before that everything is computed."""
        self._hear()
        if self._connected:
            eventually(lambda: KNOWN in self.log(), True)
        return self

    def do(self, command: str, **arguments: Any) -> Any:
        """Any command, raw."""
        self.send(command, **arguments)
        return self._hear()

    def send(self, command: str, **arguments: Any) -> None:
        """A command whose answer is fetched later, by `answers`."""
        self._pipe.send({"do": command, **arguments})

    def answers(self) -> list[Answer]:
        """What `generate` answers, sent before."""
        return [Answer(**told) for told in self._hear()]

    def generate(self, *prompts: Sequence[int], **options: Any) -> list[Answer]:
        """All prompts at once."""
        self.send("generate", prompts=prompts, **options)
        return self.answers()

    def external(self) -> tuple[int, int]:
        """Tokens that were asked of the connector, and that it had."""
        found = self.do("metrics")
        return int(found[f"{EXTERNAL}queries"]), int(found[f"{EXTERNAL}hits"])

    def sources(self) -> dict[str, int]:
        """Prompt tokens, by where their KV came from."""
        found = self.do("metrics")
        return {name.removeprefix(SOURCES): int(n) for name, n in found.items() if name.startswith(SOURCES)}

    def log(self) -> str:
        """What it wrote so far."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End it, in its own time; idempotent."""
        if not self._pipe.closed:
            self._pipe.close()
            self.process.join(60.0)
            assert self.process.exitcode == 0, f"it ended with {self.process.exitcode}:\n{self.log()[-6000:]}"

    def kill(self) -> None:
        """SIGKILL, to it and its processes; idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join(10.0)
        self._pipe.close()

    def _hear(self) -> Any:
        try:
            heard = self._pipe.recv()
        except (EOFError, ConnectionError) as exc:
            self.process.join(10.0)
            raise EngineError(f"the engine ended with {self.process.exitcode}:\n{self.log()[-6000:]}") from exc
        if "error" in heard:
            raise EngineError(f"{heard['error']}\n{self.log()[-6000:]}")
        return heard["value"]


def again(engine: Engine, *prompts: Sequence[int], **options: Any) -> list[Answer]:
    """Without what vLLM keeps itself."""
    assert engine.do("reset")
    return engine.generate(*prompts, **options)

"""What does kvtier gain a vLLM engine on this machine's CPU, and what does it cost?

Two engines, one with kvtier's connector and one without, answer the same prompts in turn, so that whatever else the
machine does hits both: SmolLM2-135M-Instruct in bfloat16, prompts of 2,000 tokens that no engine has seen before.

* `engine_vllm.hit_speedup`: time to first token without the connector over with it, all whole blocks loaded.
* `engine_vllm.miss_overhead`: by how much later the first token comes when kvtier has nothing: 0.03 is 3 %.
* `engine_vllm.decode_overhead`: by how much longer decoding takes while prompt and answer are being saved.

The engines run in `.venv-vllm` (`make install-vllm`). `--smoke`: 256 tokens, one round.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvtier
from benchmarks._harness import Ratio, emit, options, ratio
from benchmarks._host import host
from benchmarks._model import model

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Threads that spin for work make decoding ten times slower as soon as anything else runs here.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
}
ARENA = 2 << 30
BLOCK = 64
VOCABULARY = range(1000, 40_000)
PATIENCE = 60.0
KNOWN = "kvtier: the weights are"
"""What a connector logs when it begins to load and to save."""


def wait_for(what: Callable[[], bool], otherwise: str) -> None:
    """Poll until it is so."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.02)


class Engine:
    """A child with an engine, and what it answers."""

    def __init__(self, target: Path | None, log: Path, max_model_len: int) -> None:
        self._log = log
        environ = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        command = [str(PYTHON), "-m", "benchmarks.engine_vllm.child"]
        pipe = subprocess.PIPE
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, env=environ, cwd=ROOT, text=True
            )
        self.ask(model=str(model()), target=target and str(target), max_model_len=max_model_len)
        if target is not None:
            wait_for(lambda: KNOWN in log.read_text(errors="replace"), "the connector does not know the weights")

    def ask(self, **what: Any) -> Any:
        """Send a line and wait for the answer."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(what) + "\n")
        stdin.flush()
        if not (line := stdout.readline()):
            raise RuntimeError(f"an engine ended:\n{self._log.read_text(errors='replace')[-4000:]}")
        return json.loads(line)


@contextmanager
def engines(socket: Path, max_model_len: int) -> Iterator[tuple[Engine, Engine]]:
    """One without the connector, one with it."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        both: list[Engine] = []
        try:
            for name, target in (("plain", None), ("kvtier", socket)):
                both.append(Engine(target, Path(folder) / name, max_model_len))
            yield both[0], both[1]
        finally:
            for engine in both:
                engine.process.kill()
                engine.process.wait()


class Bench:
    """Both engines, and the host between them."""

    def __init__(self, plain: Engine, tiered: Engine, cache: kvtier.Cache, tokens: int) -> None:
        self._plain, self._tiered, self._cache, self._tokens = plain, tiered, cache, tokens
        self._random = random.Random(0)

    def prompt(self) -> list[int]:
        """One that nobody has seen."""
        return self._random.choices(VOCABULARY, k=self._tokens)

    @property
    def stored(self) -> int:
        """Blocks that were stored until now."""
        return int(self._cache.status()["stored"])

    def round(self, answer: int) -> dict[str, tuple[float, float]]:
        """Seconds without and with the connector: of a miss, of decoding while that is saved, and of a hit."""
        prompt, before = self.prompt(), self.stored
        asked: dict[str, Any] = {"prompt": prompt, "tokens": answer}
        # Between two runs of the baseline each, as in `paired`.
        plain, missed = self._run(self._plain, asked), self._run(self._tiered, asked)
        wanted = before + (len(prompt) + answer - 1) // BLOCK
        wait_for(lambda: self.stored >= wanted, f"not all of {wanted} blocks were stored")
        again = self._run(self._plain, asked)
        self._tiered.ask(reset=True)
        asked["tokens"] = 1
        hit, last = self._run(self._tiered, asked), self._run(self._plain, asked)
        loadable = (len(prompt) - 1) // BLOCK * BLOCK
        if (missed["cached"], hit["cached"]) != (0, loadable):
            raise RuntimeError(f"loaded {missed['cached']} and {hit['cached']} tokens, not 0 and {loadable}")
        return {
            "miss": ((plain["first"] + again["first"]) / 2, missed["first"]),
            "decode": ((plain["rest"] + again["rest"]) / 2, missed["rest"]),
            "hit": ((again["first"] + last["first"]) / 2, hit["first"]),
        }

    def _run(self, engine: Engine, asked: dict[str, Any]) -> dict[str, float]:
        answer: dict[str, float] = engine.ask(**asked)
        if engine is self._plain:
            engine.ask(reset=True)
        return answer


def measure(tokens: int, answer: int, rounds: int) -> dict[str, Ratio]:
    """Ratios of the baseline's time to the connector's."""
    found: dict[str, list[tuple[float, float]]] = {}
    with (
        host(ARENA) as socket,
        kvtier.connect(socket) as cache,
        engines(socket, tokens + answer + 8) as (plain, tiered),
    ):
        bench = Bench(plain, tiered, cache, tokens)
        bench.round(answer)
        for _ in range(rounds):
            for name, pair in bench.round(answer).items():
                found.setdefault(name, []).append(pair)
    return {name: ratio(pairs) for name, pairs in found.items()}


def main() -> None:
    chosen = options(__doc__)
    if not PYTHON.exists():
        print(
            f"skipped: vLLM has an environment of its own, and {PYTHON.parent.parent} is not there: make install-vllm"
        )
        return
    tokens, answer, rounds = (256, 66, 1) if chosen.smoke else (2000, 130, 7)
    of = measure(tokens, answer, rounds)
    figures = [
        of["hit"].figure("engine_vllm.hit_speedup", "x", tokens=tokens),
        of["miss"].overhead("engine_vllm.miss_overhead", tokens=tokens),
        of["decode"].overhead("engine_vllm.decode_overhead", tokens=answer),
    ]
    emit(figures, as_json=chosen.json)


if __name__ == "__main__":
    main()

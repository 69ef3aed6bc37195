"""What does kvtier gain a model of transformers on this machine's CPU, and what does it cost?

SmolLM2-135M-Instruct in float32 answers prompts of 2,000 tokens that nobody has seen, in turn with kvtier and without,
so that whatever else the machine does hits both; kvtier is a process of its own.

* `engine_transformers.hit_speedup`: time to first token without kvtier over with it, all whole blocks loaded.
* `engine_transformers.miss_overhead`: by how much later the first token comes when kvtier has nothing: 0.03 is 3 %.
* `engine_transformers.decode_overhead`: by how much longer decoding takes while prompt and answer are being saved.

Every answer must have the tokens of the model alone. `--smoke`: 256 tokens, one round.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import kvtier
from benchmarks._harness import Ratio, emit, options, ratio
from benchmarks._host import host
from benchmarks._model import model as folder
from kvtier.client.space import Space
from kvtier.connectors.transformers import KVTierCache, space_for
from kvtier_services.demo import model as language

ARENA = 3 << 30
BLOCK = 64
VOCABULARY = (1000, 40_000)


@dataclass
class Times(LogitsProcessor):
    """When each token's logits were there."""

    at: list[float] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.at.append(time.perf_counter())
        return scores


@dataclass(frozen=True)
class Run:
    """An answer, the seconds to its first token, and from there to its last."""

    tokens: list[int]
    first: float
    rest: float


class Bench:
    """A model and a space of it."""

    def __init__(self, cache: kvtier.Cache, threads: int) -> None:
        self._model, _ = language.load(folder(), threads)
        self._space: Space = space_for(cache, self._model, model_name=language.NAME, revision=language.REVISION)
        self._generator = torch.Generator().manual_seed(0)

    def round(self, tokens: int, answer: int) -> dict[str, tuple[float, float]]:
        """Seconds without and with kvtier: of a miss, of decoding while that is saved, and of a hit."""
        prompt = torch.randint(*VOCABULARY, (1, tokens), generator=self._generator)
        # Between two runs of the baseline each, as in `paired`.
        plain = self._run(prompt, answer)
        chat = KVTierCache(self._model, self._space, wait=5.0)
        missed = self._run(prompt, answer, chat)
        saved, loaded = chat.saved().result(), chat.loaded
        again = self._run(prompt, answer)
        chat = KVTierCache(self._model, self._space, wait=5.0)
        hit, last = self._run(prompt, 1, chat), self._run(prompt, 1)
        wanted = (tokens - 1) // BLOCK * BLOCK
        if (loaded, chat.loaded) != (0, wanted) or saved.refused:
            raise RuntimeError(f"loaded {loaded} and {chat.loaded} tokens, not 0 and {wanted}; {saved}")
        if not plain.tokens == missed.tokens == again.tokens or hit.tokens != last.tokens:
            raise RuntimeError("the tokens are not those of the model alone")
        return {
            "miss": ((plain.first + again.first) / 2, missed.first),
            "decode": ((plain.rest + again.rest) / 2, missed.rest),
            "hit": ((again.first + last.first) / 2, hit.first),
        }

    def _run(self, prompt: torch.Tensor, answer: int, chat: KVTierCache | None = None) -> Run:
        times = Times()
        began = time.perf_counter()
        given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} if chat is None else chat.turn(prompt)
        out = self._model.generate(
            **given,
            max_new_tokens=answer,
            min_new_tokens=answer,
            do_sample=False,
            logits_processor=LogitsProcessorList([times]),
        )
        return Run(out[0, prompt.shape[1] :].tolist(), times.at[0] - began, times.at[-1] - times.at[0])


def measure(tokens: int, answer: int, rounds: int) -> dict[str, Ratio]:
    """Ratios of the time without kvtier to that with it."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, list[tuple[float, float]]] = {}
    with host(ARENA) as socket, kvtier.connect(socket, threads=threads) as cache:
        bench = Bench(cache, threads)
        bench.round(BLOCK * 2, 4)
        for _ in range(rounds):
            for name, pair in bench.round(tokens, answer).items():
                found.setdefault(name, []).append(pair)
    return {name: ratio(pairs) for name, pairs in found.items()}


def main() -> None:
    chosen = options(__doc__)
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads that wait for one another sleep: else they take the cores from whatever else runs, and wait for long.
        command = [sys.executable, "-m", "benchmarks.engine_transformers", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    tokens, answer, rounds = (256, 66, 1) if chosen.smoke else (2000, 130, 7)
    of = measure(tokens, answer, rounds)
    figures = [
        of["hit"].figure("engine_transformers.hit_speedup", "x", tokens=tokens),
        of["miss"].overhead("engine_transformers.miss_overhead", tokens=tokens),
        of["decode"].overhead("engine_transformers.decode_overhead", tokens=answer),
    ]
    emit(figures, as_json=chosen.json)


if __name__ == "__main__":
    main()

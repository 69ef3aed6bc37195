"""A shared pool: a hundred requests to one system prompt, whose KV is computed and held once.

    python -m examples.tutorial.sharing [--out FOLDER] [--quick]

Takes 7 GB of memory, most of it for the copies that pages make unnecessary.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file, not with -m
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

import kvtier
from benchmarks.quality.texts import texts
from examples.tutorial._common import figure, model_for, options, save, table
from kvtier.connectors.transformers import PagedCache, pages_for, prefill, space_for
from kvtier.connectors.transformers.forward import cache_argument

ANSWER = 16
TOGETHER = 10
"""Requests whose tokens are computed in one go: either cache is put together for attention."""
QUESTION = "\n\nQuestion {:03d}, sentence {:03d}:"


@dataclass
class Held:
    """What so many requests hold.

    Attributes:
        requests: how many, after each batch of them.
        nbytes: of keys and values.
        resident: by how much the process grew.
        answers: of every request.
        seconds: in all.
    """

    requests: list[int]
    nbytes: list[int]
    resident: list[int]
    answers: list[list[int]]
    seconds: float


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def dense_nbytes(caches: list[Any]) -> int:
    """Of the keys and values that some DynamicCaches hold."""
    return sum(part.nbytes for cache in caches for layer in cache.layers for part in (layer.keys, layer.values))


@torch.inference_mode()
def answer(model: Any, questions: torch.Tensor, cache: Cache) -> list[list[int]]:
    """Greedy answers to some questions, behind what the cache holds."""
    new, said = questions, []
    for _ in range(ANSWER):
        logits = model(new, **{cache_argument(model): cache}, logits_to_keep=1).logits
        new = logits[:, -1].argmax(-1, keepdim=True)
        said.append(new)
    return torch.cat(said, 1).tolist()


def serve(model: Any, questions: torch.Tensor, fork: Callable[[int], Cache], held: Callable[[list[Any]], int]) -> Held:
    """Answer all questions, and keep their caches, as conversations that may go on."""
    caches: list[Any] = []
    found = Held([0], [held(caches)], [0], [], 0.0)
    before, began = resident(), time.perf_counter()
    for batch in questions.split(TOGETHER):
        caches.append(fork(len(batch)))
        found.answers += answer(model, batch, caches[-1])
        found.requests.append(len(found.answers))
        found.nbytes.append(held(caches))
        found.resident.append(resident() - before)
    found.seconds = time.perf_counter() - began
    return found


def in_pages(model: Any, prompt: torch.Tensor, questions: torch.Tensor) -> Held:
    """Every request is a fork of the prompt's pages."""
    kv = pages_for(model, memory=1 << 30)
    system = PagedCache(kv)
    with torch.inference_mode():
        model(prompt, **{cache_argument(model): system}, logits_to_keep=1)
    return serve(model, questions, system.fork, lambda _: kv.held_nbytes)


def copied(model: Any, prompt: torch.Tensor, questions: torch.Tensor) -> Held:
    """Every request has a DynamicCache of its own."""
    system: Any = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(prompt, **{cache_argument(model): system}, logits_to_keep=1)

    def fork(times: int) -> Any:
        cache = copy.deepcopy(system)
        cache.batch_repeat_interleave(times)
        return cache

    return serve(model, questions, fork, dense_nbytes)


def stored(model: Any, prompt: torch.Tensor, questions: torch.Tensor) -> list[tuple[int, int, float, int]]:
    """Prefill each request with a cache of blocks: tokens loaded and computed, seconds, bytes that are stored."""
    rows = []
    with kvtier.open({"cpu": {"capacity": "256MiB"}}) as cache:
        space = space_for(cache, model, model_name="tutorial", revision="1", plan="int8")
        for question in questions:
            ids = torch.cat([prompt, question[None]], 1)
            began = time.perf_counter()
            done = prefill(model, ids, space)
            seconds = time.perf_counter() - began
            if done.saved:
                done.saved.result()
            rows.append((done.loaded, done.computed, seconds, cache.status()["tiers"][0]["used"]))
    return rows


def main() -> None:
    """Hold the KV of many requests in pages and in copies, then store it in blocks for other processes."""
    asked = options(__doc__)
    model, tokenizer = model_for(asked)
    length, requests = (256, 10) if asked.quick else (1024, 100)
    prompt = tokenizer(texts()[0].read(), return_tensors="pt").input_ids[:, :length]
    questions = torch.tensor([tokenizer(QUESTION.format(n, n)).input_ids for n in range(requests)])
    pages, copies = in_pages(model, prompt, questions), copied(model, prompt, questions)
    same = sum(a == b for a, b in zip(pages.answers, copies.answers, strict=True))
    print(f"{requests} questions of {questions.shape[1]} tokens behind {length:,}, {ANSWER} tokens answered to each")
    table(
        ["", "bytes held", "of one request", "process grew by", "s"],
        [
            [name, f"{its.nbytes[-1]:,}", f"{its.nbytes[-1] / one:.1f}", f"{its.resident[-1]:,}", f"{its.seconds:.0f}"]
            for one in [copies.nbytes[1] / copies.requests[1]]
            for name, its in (("100 DynamicCaches".replace("100", str(requests)), copies), ("forks in pages", pages))
        ],
    )
    print(f"the same answers: {same} of {requests}; {copies.nbytes[-1] / pages.nbytes[-1]:.1f} times fewer bytes")

    rows = stored(model, prompt, questions[:10])
    table(
        ["blocks, plan int8", "loaded", "computed", "ms", "bytes stored"],
        [
            [f"request {number}", loaded, computed, f"{1e3 * seconds:.0f}", f"{nbytes:,}"]
            for number, (loaded, computed, seconds, nbytes) in enumerate(rows, 1)
            if number in {1, 2, len(rows)}
        ],
    )

    made, (left, right) = figure(2)
    for name, its in (("DynamicCaches", copies), ("forks in pages", pages)):
        left.plot(its.requests, [each / 2**20 for each in its.nbytes], "o-", markersize=3, label=name)
    left.set(xlabel="requests", ylabel="MiB of KV, float32", title="One system prompt, in one process", ylim=(0, None))
    left.legend()
    right.bar(range(1, len(rows) + 1), [1e3 * row[2] for row in rows])
    right.set(xlabel="request", ylabel="ms to its first token", title="Blocks, stored once: plan int8", ylim=(0, None))
    save(made, asked, "sharing")


if __name__ == "__main__":
    main()

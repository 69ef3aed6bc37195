"""What the two engine processes do. Each prints one JSON line a step, and a last one with what it measured."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import kvtier
from kvtier.client.space import Space
from kvtier.connectors.transformers import space_for
from kvtier_services.demo import model as language
from kvtier_services.demo import texts
from kvtier_services.demo.answer import Begun, begin, follow, go_on

TIERS = ("gpu", "cpu", "nvme")
COARSE = ("int8", "int4")
"""Plans that are compared with the exact model."""
PLANS = ("raw", *COARSE)


class Engine:
    """One engine: a model, a session with the host's kvtier, and the prompts.

    Args:
        folder: of the converted model.
        socket: of the host.
        asked: how many questions.
        length: tokens of an answer.
    """

    def __init__(self, folder: Path, socket: Path, asked: int, length: int) -> None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.model, self.tokenizer = language.load(folder, threads)
        self.cache = kvtier.connect(socket, threads=threads)
        self.threads, self.length = threads, length
        ship, observatory = texts.read("ship"), texts.read("observatory")
        self.prompts = [texts.prompt(self.tokenizer, ship, question) for question in texts.questions()[:asked]]
        self.second = texts.prompt(self.tokenizer, observatory, texts.SECOND_QUESTION)
        self.spaces: dict[str, Space] = {
            plan: space_for(self.cache, self.model, model_name=language.NAME, revision=language.REVISION, plan=plan)
            for plan in PLANS
        }
        begin(self.model, self.second[:64])

    def compute_and_save(self) -> dict[str, Any]:
        """Engine A: answer the first question about each document, keep the KV."""
        raw = self.spaces["raw"]
        say("engine A computes the document and answers question 1")
        first = begin(self.model, self.prompts[0], raw, save=True)
        document = [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in first.cache.layers]
        saves = [first.saved, *(self.spaces[plan].save(self.prompts[0], document) for plan in COARSE)]
        answer, _ = go_on(self.model, first, self.length)
        say("engine A computes a second document")
        second = begin(self.model, self.second, raw, save=True)
        other, _ = go_on(self.model, second, self.length)
        stored = [save.result() for save in (*saves, second.saved) if save is not None]
        return {
            "seconds": first.seconds,
            "answer": answer,
            "second": other,
            "blocks": [saved.blocks for saved in stored],
            "refused": sorted({saved.refused for saved in stored if saved.refused}),
        }

    def load_and_measure(self) -> dict[str, Any]:
        """Engine B: what it finds, each question without cache and from each tier, and the second document."""
        raw = self.spaces["raw"]
        where = tiers_of(raw, self.prompts[0])
        say("engine B answers question 1 with what it finds")
        found = begin(self.model, self.prompts[0], raw)
        answer, _ = go_on(self.model, found, self.length)
        asked = [self._question(number, prompt) for number, prompt in enumerate(self.prompts, 1)]
        say("engine B answers about the second document")
        second = begin(self.model, self.second, raw)
        other, _ = go_on(self.model, second, self.length)
        return {
            "found": facts(found) | {"lay_in": where, "answer": answer},
            "questions": asked,
            "second": facts(second) | {"answer": other},
            "stored": {plan: self._stored(plan) for plan in PLANS},
            "status": self.cache.status(),
            "threads": self.threads,
        }

    def _question(self, number: int, prompt: list[int]) -> dict[str, Any]:
        say(f"question {number}: without cache")
        plain = begin(self.model, prompt)
        expected, logits = go_on(self.model, plain, self.length)
        result: dict[str, Any] = {"without": facts(plain), "expected": expected, "text": self._text(expected)}
        result["with"], firsts, begun = {}, [], plain
        # The slowest tier last or first would always meet the machine in the same mood: they take turns.
        for tier in (*TIERS[number % 3 :], *TIERS[: number % 3]):
            say(f"question {number}: from {tier}")
            begun = moved(self.model, prompt, self.spaces["raw"], tier)
            result["with"][tier] = facts(begun)
            firsts.append(begun.token)
        answer, _ = go_on(self.model, begun, self.length)
        result["equal"] = answer == expected and firsts == expected[:1] * len(firsts)
        for plan in COARSE:
            say(f"question {number}: {plan}")
            coarse = moved(self.model, prompt, self.spaces[plan], "cpu")
            result[plan] = facts(coarse) | compared(logits, follow(self.model, coarse, expected))
        return result

    def _stored(self, plan: str) -> float:
        """Stored bytes a token."""
        space = self.spaces[plan]
        sizes = [int(block["nbytes"]) for block in space.inspect(self.prompts[0]) if block is not None]
        return sum(sizes) / max(1, len(sizes)) / space.block_tokens

    def _text(self, tokens: list[int]) -> str:
        end = tokens.index(self.tokenizer.eos_token_id) if self.tokenizer.eos_token_id in tokens else len(tokens)
        return str(self.tokenizer.decode(tokens[:end])).strip()


def moved(model: Any, prompt: list[int], space: Space, tier: str) -> Begun:
    """The first token with every stored block moved to one tier just before."""
    space.move(prompt, tier)
    return begin(model, prompt, space)


def tiers_of(space: Space, prompt: list[int]) -> dict[str, int]:
    """Blocks of a prompt by the fastest tier that has them."""
    found: dict[str, int] = {}
    for block in space.inspect(prompt):
        if block is not None:
            best = next(tier for tier in ("cpu", "gpu", "nvme", "peer") if tier in block["tiers"])
            found[best] = found.get(best, 0) + 1
    return found


def facts(begun: Begun) -> dict[str, Any]:
    """What is told of a first token."""
    return {
        "seconds": begun.seconds,
        "loaded": begun.loaded,
        "computed": begun.computed,
        "tiers": dict(begun.tiers),
    }


def compared(exact: torch.Tensor, coarse: torch.Tensor) -> dict[str, Any]:
    """How far logits `[tokens, vocabulary]` are from exact ones."""
    difference = (exact - coarse).abs()
    return {
        "agreed": int((exact.argmax(-1) == coarse.argmax(-1)).sum()),
        "positions": len(exact),
        "largest": float(difference.max()),
        "mean": float(difference.mean()),
        "spread": float(exact.std(-1).mean()),
    }


def say(step: str) -> None:
    """Tell the demo what comes now."""
    sys.stdout.write(json.dumps({"step": step}) + "\n")
    sys.stdout.flush()


def steps(asked: int) -> int:
    """How many steps both engines tell of."""
    return 6 + asked * (1 + len(TIERS) + len(COARSE))


def main() -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["A", "B"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--questions", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    chosen = parser.parse_args()
    say(f"engine {chosen.role} starts")
    began = time.perf_counter()
    engine = Engine(chosen.model, chosen.socket, chosen.questions, chosen.tokens)
    starting = time.perf_counter() - began
    with engine.cache:
        result = engine.compute_and_save() if chosen.role == "A" else engine.load_and_measure()
    sys.stdout.write(json.dumps({"result": result | {"start_seconds": starting}}) + "\n")


if __name__ == "__main__":
    main()

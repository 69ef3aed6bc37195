"""Traces for tests: the real one, and small ones made up."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from kvtier.advisor.replay import Payloads
from kvtier.advisor.trace import Request, read_trace
from kvtier.block import PAGE
from kvtier.spec import KVSpec

CONVERSATION = Path(__file__).parents[2] / "data" / "mooncake_conversation_trace.jsonl.xz"


@cache
def conversation() -> list[Request]:
    return read_trace(CONVERSATION)


def chats(count: int, *, seed: int = 1, turns: int = 6, step: int = 4) -> list[Request]:
    """Conversations that grow by `step` blocks a turn, interleaved, two seconds apart; block 0 is common to all."""
    rng = random.Random(seed)
    left = dict.fromkeys(range(count), turns)
    requests = []
    while left:
        chat = rng.choice(sorted(left))
        turn = turns - left[chat] + 1
        blocks = (0, *(1 + chat * turns * step + i for i in range(turn * step)))
        requests.append(Request(2.0 * len(requests), blocks))
        left[chat] -= 1
        if not left[chat]:
            del left[chat]
    return requests


def of_one_page() -> Payloads:
    """Blocks that take a page each, so that bytes are blocks."""
    return Payloads(PAGE, PAGE, Payloads.of("raw", KVSpec(1, 1, 64, "bfloat16")).header)

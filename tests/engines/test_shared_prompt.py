"""A hundred requests that share one system prompt hold its KV once, and answer as if each had its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from examples.tutorial.sharing import ANSWER, copied, in_pages
from kvtier.connectors.transformers import spec_for
from tests.transformers_fixture import make, words

ROOT = Path(__file__).parents[2]
PAGE, PROMPT, QUESTION, REQUESTS = 16, 1000, 9, 100


def asked():
    """A tiny model, a prompt, and a question of each request."""
    questions = torch.stack([words(n, QUESTION) for n in range(1, REQUESTS + 1)])
    return make(), words(0, PROMPT)[None], questions


def test_a_hundred_requests_hold_their_system_prompt_once():
    """62 whole pages of the prompt; its last 8 tokens, the question's 9 and 15 that were answered are 2 more each.

    The last token of an answer has no KV yet. The prompt's own 63rd page is held beside its copies.
    """
    model, prompt, questions = asked()
    shared, own = in_pages(model, prompt, questions), copied(model, prompt, questions)
    assert shared.answers == own.answers
    assert len({tuple(each) for each in own.answers}) > REQUESTS / 2, "they are answers to different questions"
    token = spec_for(model).token_nbytes
    assert own.nbytes[-1] == REQUESTS * (PROMPT + QUESTION + ANSWER - 1) * token
    assert shared.nbytes[0] == 63 * PAGE * token
    assert shared.nbytes[-1] == (63 + 2 * REQUESTS) * PAGE * token
    assert own.nbytes[-1] > 8 * shared.nbytes[-1]


@pytest.mark.parametrize("way", ["in_pages", "copied"])
def test_the_process_grows_by_what_is_held(way):
    """In a process of its own: one that has run much else has memory at hand that it does not give back."""
    code = (
        f"from examples.tutorial.sharing import {way} as run; from tests.engines.test_shared_prompt import asked; "
        "held = run(*asked()); print(held.nbytes[-1], held.resident[-1])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    held, grew = map(int, done.stdout.split())
    # Two copies of what a step makes, and the allocator's own.
    assert held / 2 < grew < 2 * held + (32 << 20)

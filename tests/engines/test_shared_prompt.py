"""A hundred requests that share one system prompt hold its KV once, and answer as if each had its own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from examples.tutorial.sharing import ANSWER, copied, in_pages
from kvtier.connectors.transformers import spec_for
from tests.transformers_fixture import make, words

PAGE, PROMPT, QUESTION, REQUESTS = 16, 1000, 9, 100


def test_a_hundred_requests_hold_their_system_prompt_once():
    """62 whole pages of the prompt; its last 8 tokens, the question's 9 and 15 that were answered are 2 more each.

    The last token of an answer has no KV yet. The prompt's own 63rd page is held beside its copies.
    """
    model = make()
    prompt, questions = words(0, PROMPT)[None], torch.stack([words(n, QUESTION) for n in range(1, REQUESTS + 1)])
    shared, own = in_pages(model, prompt, questions), copied(model, prompt, questions)
    assert shared.answers == own.answers
    assert len({tuple(each) for each in own.answers}) > REQUESTS / 2, "they are answers to different questions"
    token = spec_for(model).token_nbytes
    assert own.nbytes[-1] == REQUESTS * (PROMPT + QUESTION + ANSWER - 1) * token
    assert shared.nbytes[0] == 63 * PAGE * token
    assert shared.nbytes[-1] == (63 + 2 * REQUESTS) * PAGE * token
    assert own.resident[-1] > own.nbytes[-1] / 2 > shared.nbytes[-1] * 4
    assert shared.resident[-1] < own.resident[-1] / 4

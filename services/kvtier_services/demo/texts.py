"""What is asked about what."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

TASK = "You answer questions about the following document, in one or two sentences."
SECOND_QUESTION = "How often is the mirror of Greta washed?"


def read(name: str) -> str:
    """One of the committed texts: "ship", "observatory" or "questions"."""
    return files("kvtier_services.demo").joinpath("texts", f"{name}.txt").read_text(encoding="utf-8").strip()


def questions() -> list[str]:
    """The questions about the first document."""
    return read("questions").splitlines()


def prompt(tokenizer: Any, document: str, question: str) -> list[int]:
    """Token ids in the model's chat format: the document first, so that all questions about it share a prefix."""
    messages = [{"role": "system", "content": f"{TASK}\n\n{document}"}, {"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids

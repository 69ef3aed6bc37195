"""The texts, with where they are from."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "texts"


@dataclass(frozen=True)
class Text:
    """One text.

    Attributes:
        name: of its file.
        kind: prose, code, documentation or dialogue.
        source: what it is an excerpt of.
        licence: its terms; those that must be passed on are in `texts/LICENCES`.
    """

    name: str
    kind: str
    source: str
    licence: str

    def read(self) -> str:
        """The text itself."""
        return (FOLDER / f"{self.name}.txt").read_text(encoding="utf-8")


def texts() -> list[Text]:
    """All of them; any four in a row, from the first on, are one of each kind."""
    with (FOLDER / "manifest.toml").open("rb") as file:
        return [Text(**entry) for entry in tomllib.load(file)["text"]]

"""Which tokens the KV in a cache was computed from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.connectors.transformers.forward import Call
from kvtier.connectors.transformers.prompts import padding_mask


@dataclass(frozen=True)
class Stops:
    """What ends an answer: of a batch, rows that have ended are filled up while others go on.

    Attributes:
        ends: token ids that end an answer.
        pad: what the row is filled up with.
    """

    ends: tuple[int, ...]
    pad: int

    @classmethod
    def of(cls, model: Any) -> Stops:
        """As `model.generate` would choose them."""
        config = getattr(model, "generation_config", None) or model.config
        ends = getattr(config, "eos_token_id", None)
        known = tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (ends,)
        pad = getattr(config, "pad_token_id", None)
        return cls(known, pad if pad is not None else known[0] if known else -1)

    def lengths(self, ids: torch.Tensor, pads: tuple[int, ...]) -> list[int]:
        """Tokens of each row up to where it ended; of one that goes on, more than there are."""
        filled = (ids[:, 1:] == self.pad) & torch.isin(ids[:, :-1], torch.tensor([*self.ends, self.pad]))
        ended = [row[pad:].nonzero() for row, pad in zip(filled, pads, strict=True)]
        return [int(at[0]) + 1 if len(at) else sys.maxsize for at in ended]


class Record:
    """What a cache's columns hold, call by call.

    What a call says lies on the model's device; it is looked at when somebody wants to know, so that generation never
    waits for it.

    Args:
        ids: tokens that are there from the start, `[rows, columns]`, in CPU memory.
        pads: columns of padding of each row.

    Attributes:
        columns: how many columns there are.
        unknown: why the tokens of the last columns are not known; empty when they are.
    """

    def __init__(self, ids: torch.Tensor, pads: tuple[int, ...]) -> None:
        self._ids, self.pads = ids, pads
        self._fresh: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._doubts: list[torch.Tensor] = []
        self.columns, self.unknown = int(ids.shape[1]), ""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [max(0, self.columns - pad) for pad in self.pads]

    def add(self, call: Call) -> None:
        """The columns that one call of the model computed."""
        self.unknown = self.unknown or call.other or self._problem(call)
        if not self.unknown and call.ids is not None:
            self._doubt(call)
            places = None if call.positions is None else call.positions.detach().clone()
            self._fresh.append((call.ids.detach().clone(), places))
            self.columns += int(call.ids.shape[1])

    def cut(self, columns: int) -> None:
        """Only the first columns are there any more."""
        self._ids = self.ids()[:, :columns]
        self.columns = int(self._ids.shape[1])

    def known(self) -> torch.Tensor | None:
        """The tokens of all columns, `[rows, columns]`, in CPU memory; None when some are not known."""
        ids = self.ids()
        return None if self.unknown else ids

    def ids(self) -> torch.Tensor:
        """The tokens, `[rows, columns]`, in CPU memory; those before what is unknown."""
        fresh, self._fresh = self._fresh, []
        if self._doubts and bool(torch.stack(self._doubts).any()):
            self.unknown = self.unknown or "mask"
        elif not self._in_place(fresh):
            self.unknown = self.unknown or "positions"
        elif fresh:
            self._ids = torch.cat([self._ids, *(ids.cpu() for ids, _ in fresh)], 1)
        self._doubts = []
        self.columns = int(self._ids.shape[1])
        return self._ids

    def _problem(self, call: Call) -> str:
        """Why the KV cannot be that of the call's tokens in their places; empty when it may be."""
        if call.ids is None or call.ids.dim() != 2 or call.ids.shape[0] != len(self.pads):
            return "input"
        rows, columns = len(self.pads), int(call.ids.shape[1])
        if any(self.pads) if call.mask is None else call.mask.shape != (rows, self.columns + columns):
            return "mask"
        if call.positions is None:
            return "positions" if any(self.pads) else ""
        return "" if call.positions.shape in ((1, columns), (rows, columns)) else "positions"

    def _doubt(self, call: Call) -> None:
        """Compare the mask, on its device: there is one a call, and it is long."""
        if call.mask is not None:
            pads = torch.tensor(self.pads, device=call.mask.device)
            self._doubts.append((call.mask != padding_mask(pads, call.mask.shape[1])).any())

    def _in_place(self, fresh: list[tuple[torch.Tensor, torch.Tensor | None]]) -> bool:
        """Whether the tokens of these calls were computed as what stands in their columns."""
        pads, end = torch.tensor(self.pads)[:, None], int(self._ids.shape[1])
        for ids, positions in fresh:
            first, end = end, end + int(ids.shape[1])
            places = torch.arange(first, end) - pads
            if positions is not None and bool(((positions.cpu() != places) & (places >= 0)).any()):
                return False
        return True

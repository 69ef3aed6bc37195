"""The prompts of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvtier.errors import UsageError


@dataclass(frozen=True)
class Prompts:
    """Token ids of one or several prompts of different lengths, padded on the left.

        row 0   . . . a b c d e     pad 3
        row 1   f g h i j k l m     pad 0

    Attributes:
        ids: int64 `[rows, columns]`, in CPU memory.
        pads: how many columns of each row are padding.
        padded: the same, as an attention mask.
    """

    ids: torch.Tensor
    pads: tuple[int, ...]
    padded: torch.Tensor

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None) -> Prompts:
        """Look at what a tokenizer made.

        Args:
            input_ids: `[rows, columns]`, or one prompt.
            attention_mask: of the same shape; 0 for padding. Without it there is none.

        Raises:
            UsageError: no tokens, or a mask that is not padding on the left.
        """
        ids = torch.as_tensor(input_ids).cpu()
        ids = (ids[None] if ids.dim() == 1 else ids).long()
        if ids.dim() != 2 or not ids.numel():
            raise UsageError(f"input_ids has the shape {list(ids.shape)}; pass one sequence, or [rows, columns]")
        if attention_mask is None:
            return cls(ids, (0,) * len(ids), torch.ones_like(ids))
        mask = torch.as_tensor(attention_mask).cpu()
        mask = (mask[None] if mask.dim() == 1 else mask).long()
        if mask.shape != ids.shape:
            raise UsageError(f"attention_mask has the shape {list(mask.shape)}, input_ids {list(ids.shape)}")
        pads = tuple((mask == 0).sum(1).tolist())
        if not torch.equal(mask, padding_mask(pads, ids.shape[1])) or max(pads) == ids.shape[1]:
            raise UsageError(
                "attention_mask hides tokens that are not padding on the left: the KV of what is left would not be "
                "that of the tokens; tokenize with padding_side='left'"
            )
        return cls(ids, pads, mask)

    @property
    def columns(self) -> int:
        """Length of the longest prompt."""
        return int(self.ids.shape[1])

    def row(self, number: int) -> torch.Tensor:
        """One prompt without its padding."""
        return self.ids[number, self.pads[number] :]


def padding_mask(pads: Any, columns: int) -> torch.Tensor:
    """The mask `[rows, columns]` of rows that are padded on the left."""
    left = torch.as_tensor(pads)
    return (torch.arange(columns, device=left.device) >= left[:, None]).long()


def one_sequence(input_ids: Any, attention_mask: Any = None) -> torch.Tensor:
    """A single prompt, `[1, tokens]`.

    Raises:
        UsageError: there are several, or none; or a mask that hides tokens.
    """
    ids = torch.as_tensor(input_ids)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise UsageError(
            f"input_ids has the shape {list(ids.shape)}; pass one sequence, [1, tokens], a call (for several there is "
            "KVTierCache)"
        )
    if attention_mask is not None:
        mask = torch.as_tensor(attention_mask)
        if mask.numel() != ids.numel() or not bool((mask == 1).all()):
            raise UsageError(
                "attention_mask hides tokens or is not as long as input_ids: the KV of what is left would not be that "
                "of the tokens; pass the sequence without padding"
            )
    return ids

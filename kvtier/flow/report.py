"""What a sequence's KV takes, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """Bytes of one sequence's KV. What is held is measured: the memory of every tensor and buffer of KV.

    What says where pieces are, 32 bytes each, is not counted: less than a hundredth of them.

    Attributes:
        tokens: that came, dropped ones included.
        native: of the KV of all of them in 16 bits.
        pruned: of the KV of those that are left, in 16 bits.
        exact: of the first tokens, in 16 bits.
        aged: of the encoded ones.
        recent: of the youngest, in 16 bits; while a prompt is computed, of all, in the model's dtype.
        scratch: of the room that a layer is read into, in the model's dtype.
        pruner: of what is known to decide what stays.
        peak: the most that was held at once, before or after a forward.
    """

    tokens: int
    native: int
    pruned: int
    exact: int
    aged: int
    recent: int
    scratch: int
    pruner: int
    peak: int

    @property
    def stored(self) -> int:
        """Of those that are left, as they are stored."""
        return self.exact + self.aged + self.recent

    @property
    def held(self) -> int:
        """All that is held."""
        return self.stored + self.scratch + self.pruner

    @property
    def saved(self) -> float:
        """Share of `native` that is not held."""
        return 1 - self.held / self.native if self.native else 0.0

    def __str__(self) -> str:
        lines = {
            f"native, {self.tokens:,} tokens in 16 bits": self.native,
            "after pruning, in 16 bits": self.pruned,
            "as stored": self.stored,
            "  first tokens, exact": self.exact,
            "  aged, encoded": self.aged,
            "  recent, in 16 bits": self.recent,
            "scratch of one layer": self.scratch,
            "tables of the pruner": self.pruner,
            "held in all": self.held,
            "at most": self.peak,
        }
        share = 100 / self.native if self.native else 0.0
        return "\n".join(f"{name:40} {nbytes:>14,} {nbytes * share:6.1f} %" for name, nbytes in lines.items())

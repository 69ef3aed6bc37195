"""Rotary position embeddings: keys turned from the positions they were computed at to others."""

from __future__ import annotations

from typing import Any

import torch

from kvtier.errors import UnsupportedKV

SHIFTING = frozenset(("dynamic", "longrope"))
"""Kinds whose frequencies depend on the length of the sequence: a key cannot be turned alone."""


class Rope:
    """Turns keys and queries by a number of positions (arXiv 2104.09864).

    The layout is that of transformers' `rotate_half`: element i and element i + n/2 of the first n are a pair. A model
    that scales cosine and sine (YaRN) may be turned too: the factor is in the keys already. Rotations add up, so that
    a key turned by b - a equals the one computed at b instead of a, to rounding; in bfloat16 each turn rounds anew.

    Args:
        frequencies: radians a position of each pair, `[n / 2]`.
    """

    def __init__(self, frequencies: torch.Tensor) -> None:
        self.frequencies = frequencies.detach().double().cpu()
        self._cosines = self._sines = torch.empty(0, len(frequencies))

    @classmethod
    def of(cls, model: Any) -> Rope:
        """The rotation of a transformers model.

        Raises:
            UnsupportedKV: it has none, several, or one that changes with the sequence's length.
        """
        config = model.config.get_text_config(decoder=True)
        parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        buffers = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "inv_freq"]
        if kind in SHIFTING or not buffers or any(not torch.equal(buffers[0], buffer) for buffer in buffers):
            raise UnsupportedKV(
                f"positions cannot be closed up: the model's RoPE ({kind!r}, {len(buffers)} tables) has no one set of "
                "frequencies; use compact=False"
            )
        return cls(buffers[0])

    def turn(self, part: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Keys or queries `[..., tokens, head_dim]` as they would be `by` positions further on, `[..., tokens]`."""
        cosines, sines = self._tables(int(by.abs().max()) if by.numel() else 0, part.device)
        cosine, sine = cosines[by.abs()], sines[by.abs()] * by.sign()[..., None]
        half = len(self.frequencies)
        first, second = part[..., :half].float(), part[..., half : 2 * half].float()
        turned = part.clone()
        turned[..., :half] = first * cosine - second * sine
        turned[..., half : 2 * half] = second * cosine + first * sine
        return turned

    def _tables(self, furthest: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if furthest >= len(self._cosines) or self._cosines.device != device:
            # In float64: at position 100,000 an angle in float32 is off by a hundredth.
            angles = torch.arange(max(furthest + 1, 2 * len(self._cosines))).double()[:, None] * self.frequencies
            self._cosines, self._sines = angles.cos().float().to(device), angles.sin().float().to(device)
        return self._cosines, self._sines

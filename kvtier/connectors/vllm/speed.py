"""How fast the engine computes, by the steps that do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

TELLING = 256
"""Tokens of a step from which on it says something."""
STEPS = 64
"""That may be under way."""


class Speed:
    """Measures steps, of which several may be under way, and not all are reported.

    Args:
        tell: told of each that says something: its tokens, and its seconds.
        clock: monotonic seconds.
    """

    def __init__(self, tell: Callable[[int, float], None], clock: Callable[[], float]) -> None:
        self._tell, self._clock = tell, clock
        self._steps: deque[tuple[int, float, int]] = deque(maxlen=STEPS)
        self._until = 0.0

    def begins(self, step: int, tokens: int) -> None:
        """A step, with a number above those before, is scheduled."""
        self._steps.append((step, self._clock(), tokens))

    def ended(self, step: int) -> None:
        """All steps up to this one have ended; 0 for none."""
        while self._steps and self._steps[0][0] <= step:
            (number, began, tokens), now = self._steps.popleft(), self._clock()
            if number == step:
                seconds, self._until = now - max(began, self._until), now
                if tokens >= TELLING and seconds > 0:
                    self._tell(tokens, seconds)

from __future__ import annotations

import pytest

from kvtier.client.backoff import FIRST, LONGEST, Backoff
from kvtier.errors import SessionUnavailable


def test_pauses_double_up_to_the_longest_and_begin_anew_after_an_answer():
    now = [0.0]
    backoff = Backoff(lambda: now[0])
    backoff.check()
    pause = FIRST
    for _ in range(8):
        backoff.failed(SessionUnavailable("gone"))
        now[0] += 0.9 * pause
        with pytest.raises(SessionUnavailable, match="gone"):
            backoff.check()
        now[0] += 0.2 * pause
        backoff.check()
        pause = min(2 * pause, LONGEST)
    backoff.worked()
    backoff.failed(SessionUnavailable("gone"))
    now[0] += 1.1 * FIRST
    backoff.check()

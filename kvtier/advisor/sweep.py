"""Replays around a setup: more memory, less memory, other plans."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.advisor.models import spec_of
from kvtier.advisor.replay import Outcome, Setup, replay, why_not
from kvtier.advisor.trace import Request, read_trace

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the memory of all tiers."""
PLANS = ("raw", "int8", "k8v4", "int4")
"""That are compared: one of each size. `docs/quality.md` has what each costs."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Outcomes around a setup.

    Attributes:
        asked: of the setup itself.
        sizes: by factor of its memory, where that is enough; empty when only the setup was asked for.
        plans: by plan, at its memory, where that is enough.
    """

    asked: Outcome
    sizes: dict[float, Outcome]
    plans: dict[str, Outcome]


def sweep(
    path: Path, setup: Setup, block_tokens: int, *, alone: bool = False, say: Callable[[str], None] = lambda _: None
) -> Sweep:
    """Replay a trace around a setup, on all processors.

    Args:
        path: of the trace.
        setup: what is asked for.
        block_tokens: tokens that an id of the trace stands for.
        alone: only that.
        say: is told how far it is.

    Raises:
        ConfigError: as `read_trace` and `replay`.
    """
    trace = read_trace(path)
    if alone:
        say("replaying")
        return Sweep(replay(trace, setup, block_tokens), {}, {})
    spec = spec_of(setup.model, block_tokens)
    sizes = {factor: one for factor in FACTORS if not why_not(one := _times(setup, factor), spec)}
    plans = {plan: replace(setup, plan=plan) for plan in dict.fromkeys((*PLANS, setup.plan))}
    plans = {plan: one for plan, one in plans.items() if not why_not(one, spec)}
    wanted = list(dict.fromkeys((setup, *plans.values(), *sizes.values())))
    outcomes: dict[Setup, Outcome] = {}
    for one, outcome in zip(wanted, _all(path, trace, wanted, block_tokens), strict=True):
        outcomes[one] = outcome
        say(f"replayed {len(outcomes)} of {len(wanted)}")
    return Sweep(
        outcomes[setup],
        {factor: outcomes[one] for factor, one in sizes.items()},
        {plan: outcomes[one] for plan, one in plans.items()},
    )


def _times(setup: Setup, factor: float) -> Setup:
    gpu, cpu, nvme = (int(factor * nbytes) for nbytes in (setup.gpu, setup.cpu, setup.nvme))
    return replace(setup, gpu=gpu, cpu=cpu, nvme=nvme)


_trace: list[Request] = []
"""Of a worker process."""


def _all(path: Path, trace: Sequence[Request], setups: Sequence[Setup], block_tokens: int) -> Iterator[Outcome]:
    # The setup itself comes first and in this process: what is wrong with it is said before others are started.
    yield replay(trace, setups[0], block_tokens)
    others = setups[1:]
    if others:
        workers = min(os.cpu_count() or 1, len(others))
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            yield from pool.map(_replay, [path] * len(others), others, [block_tokens] * len(others))


def _replay(path: Path, setup: Setup, block_tokens: int) -> Outcome:
    if not _trace:
        _trace.extend(read_trace(path))
    return replay(_trace, setup, block_tokens)

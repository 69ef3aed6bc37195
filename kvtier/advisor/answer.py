"""From a question to its answer."""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from pathlib import Path

from kvtier.advisor.models import spec_of
from kvtier.advisor.plot import plot
from kvtier.advisor.replay import Setup
from kvtier.advisor.report import as_dict, as_text
from kvtier.advisor.sweep import sweep
from kvtier.advisor.trace import ceiling, read_trace
from kvtier.errors import ConfigError


def answer(
    path: Path,
    setup: Setup,
    block_tokens: int,
    *,
    alone: bool = False,
    picture: Path | None = None,
    json: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Replay a trace around a setup, as `sweep` does, and say what came of it.

    Args:
        path: of the trace.
        setup: what is asked for.
        block_tokens: tokens that an id of the trace stands for.
        alone: only the setup itself; then there is no picture.
        picture: file for one.
        json: for machines.
        say: is told how far it is.

    Raises:
        ConfigError: as `read_trace` and `replay`; a picture of a setup alone; no matplotlib.
    """
    if picture is not None and alone:
        raise ConfigError("a picture needs more than one setup to show: leave out --alone or --plot")
    spec, limit = spec_of(setup.model, block_tokens), ceiling(read_trace(path))
    found = sweep(path, setup, block_tokens, alone=alone, say=say)
    if picture is not None:
        plot(setup, found, limit, picture)
    return dumps(as_dict(setup, found, spec, limit)) if json else as_text(setup, found, spec, limit)

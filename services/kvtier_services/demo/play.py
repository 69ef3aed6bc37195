"""The demo from beginning to end."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvtier.errors import KVTierError
from kvtier_services.demo.model import require_packages

QUESTIONS, TOKENS = 6, 32


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo and print what it measured; the exit code.

    Args:
        arguments: `--json` for one JSON line a figure.
    """
    parser = argparse.ArgumentParser(prog="kvtier demo", description="A language model answers over a long document.")
    parser.add_argument("--json", action="store_true", help="one JSON line a figure")
    as_json = parser.parse_args(list(arguments)).json
    console = Console(stderr=as_json)
    try:
        measured = play(console=Console(stderr=True))
    except KVTierError as exc:
        console.print(f"kvtier demo: {exc}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("kvtier demo: interrupted; everything is stopped", style="red")
        return 130
    from kvtier_services.demo.figures import figures, served_by_tier, tokens_equal
    from kvtier_services.demo.report import report

    if as_json:
        for line in figures(measured):
            sys.stdout.write(json.dumps(line) + "\n")
    else:
        console.print(report(measured))
    return 0 if tokens_equal(measured) and len(served_by_tier(measured)) == 3 else 1


def play(*, questions: int = QUESTIONS, tokens: int = TOKENS, console: Console | None = None) -> dict[str, Any]:
    """Start a kvtier, let engine A and then engine B answer, stop it.

    Args:
        questions: how many of the questions about the document.
        tokens: length of each answer.
        console: shows what is done; on a terminal as a progress bar.

    Returns:
        What both engines measured (`A`, `B`), `labels` of the tiers, `view` of the status, and the `seconds` it took.

    Raises:
        KVTierError: something does not work; everything is stopped and removed.
    """
    require_packages()
    from kvtier_services.cluster.look import snapshots
    from kvtier_services.cluster.up import up
    from kvtier_services.demo.engine import steps
    from kvtier_services.demo.stage import stage
    from kvtier_services.monitor.status import render

    began = time.monotonic()
    with _progress(console or Console(stderr=True), 3 + steps(questions)) as say, stage() as made:
        say("starting kvtier: Ray, Redis and three tiers")
        made.model.mkdir()
        converting = made.start("model", str(made.model))
        started = up(made.config)
        say("reading the language model (about 20 seconds)")
        made.finish(converting)
        options = ["--model", str(made.model), "--socket", started.running.socket]
        options += ["--questions", str(questions), "--tokens", str(tokens)]
        a = made.finish(made.start("engine", "A", *options), say)
        b = made.finish(made.start("engine", "B", *options), say)
        labels = {tier["tier"]: tier["label"] for tier in started.hosts[0]["hierarchy"]["tiers"]}
        with snapshots(made.config, started.running) as snapshot:
            view = render(snapshot())
        say("stopping everything")
    return {"A": a, "B": b, "labels": labels, "view": view, "seconds": time.monotonic() - began}


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; elsewhere a line a step."""
    if not console.is_terminal:
        yield lambda step: console.print(step, markup=False, highlight=False)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda step: progress.update(task, description=step, advance=1)

"""How much of a model's predictions does each precision plan change, and how many bits a value does it take?

Figures: `quality.PLAN.kl`, `.dnll`, `.top1` and `.bits` of every named plan and of every `--plan`. A run over all 12
texts takes minutes; `--quick` reads one text of each kind.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks._harness import emit, parser
from benchmarks.quality.texts import texts
from benchmarks.quality.unusable import Unusable
from kvtier.codecs.plan import NAMED, parse_plan
from kvtier.errors import ConfigError

CORES = len(os.sched_getaffinity(0))
SMOKE_CONTEXT, SMOKE_TOKENS, SMOKE_PLANS = 128, 16, ("raw", "int4")
QUICK_TEXTS, QUICK_TOKENS = 4, 128


def main() -> int:
    console = Console(stderr=True)
    began = time.monotonic()
    try:
        _run(_options(), console)
    except (Unusable, ConfigError) as exc:
        console.print(f"benchmarks.quality: {exc}", style="red", markup=False, highlight=False)
        return 1
    console.print(f"took {time.monotonic() - began:.0f} s", highlight=False)
    return 0


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one text of each kind, 128 tokens scored")
    options.add_argument("--model", help="a folder or name that transformers loads; default: SmolLM2-135M-Instruct")
    options.add_argument(
        "--plan", action="append", default=[], metavar="TEXT", help="measure this plan too; repeatable"
    )
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw KL over bits: a PNG, SVG or PDF")
    options.add_argument("--context", type=int, default=1024, help="tokens whose KV is stored (1024)")
    options.add_argument("--tokens", type=int, default=256, help="tokens scored after them (256)")
    options.add_argument("--threads", type=int, default=CORES, help=f"of the model ({CORES})")
    chosen = options.parse_args()
    chosen.texts = texts()
    chosen.plans = list(dict.fromkeys([*(SMOKE_PLANS if chosen.smoke else NAMED), *chosen.plan]))
    if chosen.smoke:
        chosen.texts, chosen.context, chosen.tokens = chosen.texts[:1], SMOKE_CONTEXT, SMOKE_TOKENS
    elif chosen.quick:
        chosen.texts, chosen.tokens = chosen.texts[:QUICK_TEXTS], min(chosen.tokens, QUICK_TOKENS)
    return chosen


def _run(chosen: argparse.Namespace, console: Console) -> None:
    for plan in chosen.plans:
        parse_plan(plan)  # what cannot be measured is said before the model is loaded
    from benchmarks.quality.measure import measure
    from benchmarks.quality.model import DEFAULT, load
    from benchmarks.quality.plot import plot, require
    from benchmarks.quality.report import figures, table

    if chosen.plot:
        require()

    def say(step: str) -> None:
        console.print(step, markup=False, highlight=False)

    name = chosen.model or DEFAULT
    say(f"loading {name}")
    model, tokenizer = load(chosen.model, chosen.threads)
    lengths = {"context": chosen.context, "tokens": chosen.tokens}
    results = measure(model, tokenizer, chosen.plans, chosen.texts, **lengths, say=say)
    title = f"{name}, {chosen.context:,} tokens stored, {chosen.tokens} scored, {len(chosen.texts)} texts"
    if chosen.json:
        emit(figures(results, model=name, **lengths), as_json=True)
    else:
        Console().print(table(results, title))
    if chosen.plot:
        plot(results, list(NAMED), title, chosen.plot)


if __name__ == "__main__":
    sys.exit(main())

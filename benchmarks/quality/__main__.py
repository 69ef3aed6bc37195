"""How much of a model's predictions does it cost to hold less KV, by precision, by pruning, and by both?

Figures: `quality.STRATEGY.kl`, `.dnll`, `.top1`, `.keep`, `.bits` and `.share` of every named plan, of every pruning
preset at several budgets, of both together, and of every `--strategy`; with `--save` or `--docs` also how fast the
plans' codecs are. A run over all 12 texts takes some 23 minutes of one core's time; `--quick`, one text of
each kind, four.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks._harness import emit, parser
from benchmarks.quality.strategies import OWN, PLANS, SPLIT, Strategy, parse, standard
from benchmarks.quality.texts import texts
from benchmarks.quality.unusable import Unusable
from kvtier.codecs.plan import NAMED
from kvtier.errors import ConfigError, UnsupportedKV

CORES = len(os.sched_getaffinity(0))
SMOKE_CONTEXT, SMOKE_TOKENS = 128, 16
SMOKE = ("raw", "int4", "snap_kv(keep=0.5)", "attention_threshold(weight=0.01)", "int4*h2o(keep=0.5)", SPLIT)
WIDTH = 140
"""Of the table where there is no terminal."""
QUICK_TEXTS, QUICK_TOKENS = 4, 128


def main() -> int:
    console = Console(stderr=True)
    began = time.monotonic()
    try:
        _run(_options(), lambda step: console.print(step, markup=False, highlight=False))
    except (Unusable, ConfigError, UnsupportedKV) as exc:
        console.print(f"benchmarks.quality: {exc}", style="red", markup=False, highlight=False)
        return 1
    console.print(f"took {time.monotonic() - began:.0f} s", highlight=False)
    return 0


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one text of each kind, 128 tokens scored")
    options.add_argument("--model", help="a folder or name that transformers loads; default: SmolLM2-135M-Instruct")
    options.add_argument(
        "--strategy",
        "--plan",
        action="append",
        default=[],
        metavar="TEXT",
        help="measure this, too: a plan, a pruning, or both, as in 'int4*snap_kv(keep=0.4)'; repeatable",
    )
    options.add_argument("--only", action="store_true", help="nothing but raw and every --strategy")
    options.add_argument("--no-pruning", action="store_true", help="plans alone")
    options.add_argument("--save", type=Path, metavar="FILE", help="write a JSON file for kvtier advise --measured")
    options.add_argument("--docs", type=Path, metavar="FILE", help="rewrite the tables between a page's markers")
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw KL over bits: a PNG, SVG or PDF")
    options.add_argument("--plot-held", type=Path, metavar="FILE", help="draw KL over the bytes that are held")
    options.add_argument("--context", type=int, default=1024, help="tokens whose KV is stored (1024)")
    options.add_argument("--tokens", type=int, default=256, help="tokens scored after them (256)")
    options.add_argument("--threads", type=int, default=CORES, help=f"of the model ({CORES})")
    chosen = options.parse_args()
    chosen.texts = texts()
    if chosen.smoke:
        chosen.texts, chosen.context, chosen.tokens = chosen.texts[:1], SMOKE_CONTEXT, SMOKE_TOKENS
    elif chosen.quick:
        chosen.texts, chosen.tokens = chosen.texts[:QUICK_TEXTS], min(chosen.tokens, QUICK_TOKENS)
    chosen.strategies = _strategies(chosen)
    return chosen


def _strategies(chosen: argparse.Namespace) -> list[Strategy]:
    """What is to be measured, each once; what cannot be is said before the model is loaded."""
    if chosen.only:
        made = [parse("raw", PLANS)]
    elif chosen.smoke:
        made = [parse(text, PLANS) for text in SMOKE]
    else:
        made = standard(chosen.context)
    made += [parse(text, OWN) for text in chosen.strategy]
    if chosen.no_pruning:
        made = [one for one in made if not one.pruning]
    return list({one.name: one for one in reversed(made)}.values())[::-1]


def _run(chosen: argparse.Namespace, say: Callable[[str], None]) -> None:
    from benchmarks.quality import pages
    from benchmarks.quality.measure import measure
    from benchmarks.quality.model import DEFAULT, load
    from benchmarks.quality.plot import plot, plot_held, require
    from benchmarks.quality.report import figures, table
    from benchmarks.quality.save import save
    from benchmarks.quality.speed import coded, speeds
    from kvtier.connectors.transformers import spec_for

    if chosen.plot or chosen.plot_held:
        require()
    if chosen.docs:
        pages.check(chosen.docs)
    name = chosen.model or DEFAULT
    say(f"loading {name}")
    model, tokenizer = load(chosen.model, chosen.threads)
    lengths = {"context": chosen.context, "tokens": chosen.tokens}
    results = measure(model, tokenizer, chosen.strategies, chosen.texts, **lengths, say=say)
    fast = []
    if chosen.save or chosen.docs:
        say("codecs")
        fast = speeds(replace(spec_for(model), dtype="bfloat16"), coded(), smoke=chosen.smoke)
    title = f"{name}, {chosen.context:,} tokens stored, {chosen.tokens} scored, {len(chosen.texts)} texts"
    if chosen.json:
        emit(figures(results, model=name, **lengths), as_json=True)
        emit((figure for one in fast for figure in one.figures()), as_json=True)
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH).print(table(results, title))
    if chosen.save:
        save(chosen.save, results, fast, chosen.texts, model=name, **lengths)
    if chosen.docs:
        pages.rewrite(chosen.docs, results, fast)
    if chosen.plot:
        plot(results, list(NAMED), title, chosen.plot)
    if chosen.plot_held:
        plot_held(results, title, chosen.plot_held)


if __name__ == "__main__":
    sys.exit(main())

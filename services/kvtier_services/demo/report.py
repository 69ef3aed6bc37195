"""What was measured, for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier_services.demo.engine import COARSE, TIERS
from kvtier_services.demo.figures import Measured, figures, median_seconds, served_by_tier, tokens_equal
from kvtier_services.demo.texts import questions

GO_ON = (
    ("kvtier up", "start kvtier on this host (`status`, `down`)"),
    ("kvtier doctor", "what this machine lacks, and how to fix it"),
    ("kvtier config explain", "every setting, as a kvtier.toml"),
    ("python examples/transformers_chat.py MODEL", "chat over a document of yours"),
)


def report(measured: Measured) -> RenderableType:
    """A table of the times, what else was found, and how to go on."""
    return Group(*_parts(measured))


def _parts(measured: Measured) -> Iterator[RenderableType]:
    b = measured["B"]
    named = {line["figure"]: line for line in figures(measured)}
    yield _times(measured)
    found = b["found"]
    lay = ", ".join(f"{count} blocks in {tier}" for tier, count in found["lay_in"].items())
    yield Text(
        f"Question 1, apart: engine B found {lay}, and had its first token after {found['seconds']:.2f} s "
        f"({named['demo.speedup.found']['value']:.1f} x)."
    )
    for plan in COARSE:
        line = named[f"demo.agreement.{plan}"]
        yield Text(
            f"{plan}: {line['value']:.1%} of {line['positions']} tokens are those that the exact model chose; logits "
            f"differ by {line['logit_difference_mean']:.3f} on average, {line['logit_difference_max']:.2f} at most "
            f"(their spread is {line['logit_spread']:.1f})."
        )
    served = served_by_tier(measured)
    yield Text("Hits served, in tokens: " + ", ".join(f"{tier} {served.get(tier, 0):,}" for tier in TIERS))
    yield ""
    for question, asked in zip(questions(), b["questions"], strict=False):
        yield Text.assemble((question, "bold"), "\n  ", asked["text"])
    yield Text("(A model of 135 million parameters: quick on any machine, and not always right.)", style="dim")
    yield ""
    yield Text("kvtier's status just before it was stopped", style="bold")
    yield measured["view"]
    yield ""
    yield Text("How to go on", style="bold")
    go_on = Table.grid(padding=(0, 2))
    for command, what in GO_ON:
        go_on.add_row(f"  {_where(command)}", what)
    yield go_on


def _where(command: str) -> str:
    """The command as it can be typed here: with its folder when that is not on the PATH."""
    program, _, rest = command.partition(" ")
    folder = Path(sys.executable).parent
    if which(program) == str(folder / program):
        return command
    return f"{os.path.relpath(folder / program)} {rest}"


def _times(measured: Measured) -> Table:
    b = measured["B"]
    timed = b["questions"][1:] or b["questions"]
    without = median_seconds(timed)
    raw = b["stored"]["raw"]
    table = Table(
        title=f"Time to first token: engine B, median of {len(timed)} questions over one document",
        caption="Each question has its own speedup; their median is shown, as the median time is.",
        box=None,
    )
    for column in ("KV from", "time", "speedup", "loaded", "computed", "bytes/token", "tokens"):
        table.add_column(column, justify="left" if column == "KV from" else "right")
    computed = timed[-1]["without"]["computed"]
    table.add_row("no cache", f"{without:.3f} s", "1.0 x", "0", f"{computed:,}", "", "")
    equal = "equal" if tokens_equal(measured) else "DIFFERENT"
    named = {line["figure"]: line for line in figures(measured)}
    for tier in TIERS:
        line = named[f"demo.speedup.{tier}"]
        table.add_row(
            line["label"],
            f"{line['seconds']:.3f} s",
            f"{line['value']:.1f} x",
            f"{line['loaded']:,}",
            f"{line['computed']:,}",
            f"{raw:,.0f}",
            equal,
        )
    for plan in COARSE:
        seconds = sorted(one[plan]["seconds"] for one in timed)[len(timed) // 2]
        nbytes, last = b["stored"][plan], timed[-1][plan]
        agreement = named[f"demo.agreement.{plan}"]["value"]
        table.add_row(
            f"{measured['labels'].get('cpu', 'cpu')}, {plan}",
            f"{seconds:.3f} s",
            f"{without / seconds:.1f} x",
            f"{last['loaded']:,}",
            f"{last['computed']:,}",
            f"{nbytes:,.0f} ({nbytes / raw:.0%})",
            f"{agreement:.1%} equal",
        )
    return table

"""How much earlier is the first token when a prompt's KV is loaded instead of computed?

The demo's figures, measured by the demo: `demo.speedup.{gpu,cpu,nvme}` (time to first token without cache over with,
median of questions 2 to 6 over one document), `demo.tokens_equal.raw`, `demo.agreement.int8`, and what belongs to them.
`--smoke`: two questions, four tokens each.
"""

from __future__ import annotations

from benchmarks._harness import Figure, emit, options
from kvtier_services.demo.figures import figures
from kvtier_services.demo.play import play


def main() -> None:
    chosen = options(__doc__)
    measured = play(questions=2, tokens=4) if chosen.smoke else play()
    named = ("figure", "value", "unit", "better")
    emit(
        (
            Figure(
                line["figure"],
                line["value"],
                line["unit"],
                line["better"],
                {name: value for name, value in line.items() if name not in named},
            )
            for line in figures(measured)
        ),
        as_json=chosen.json,
    )


if __name__ == "__main__":
    main()

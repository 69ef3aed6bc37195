"""How fast the plans' codecs are on blocks of the model's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks._harness import Figure, paired
from benchmarks.codecs import UNIT, Workload
from kvtier.codecs.plan import NAMED, ByAge, parse_plan
from kvtier.codecs.registry import codec_for
from kvtier.spec import KVSpec

NBYTES, SMOKE_NBYTES = 256 << 20, 8 << 20
WHAT = "of memcpy of the 16-bit block, one thread"


@dataclass(frozen=True)
class Speed:
    """One plan's codec.

    Attributes:
        plan: its name.
        encode: time of a copy of the 16-bit KV over that of encoding it: above 1 is faster than the copy.
        decode: likewise.
        block_nbytes: of a block's body, not a sequence's first.
    """

    plan: str
    encode: float
    decode: float
    block_nbytes: int

    def figures(self) -> Iterator[Figure]:
        """`quality.PLAN.encode` and `.decode`."""
        for call in ("encode", "decode"):
            yield Figure(f"quality.{self.plan}.{call}", getattr(self, call), UNIT, "higher", {"plan": self.plan})


def coded() -> list[str]:
    """Named plans that are one codec."""
    return [name for name in NAMED if not isinstance(parse_plan(name), ByAge)]


def speeds(spec: KVSpec, plans: Sequence[str], *, smoke: bool = False) -> list[Speed]:
    """Encode and decode out of cache, on one thread, against a copy in the same second; medians of the rounds."""
    blocks = max(2, (SMOKE_NBYTES if smoke else NBYTES) // spec.block_nbytes)
    workload = Workload(blocks * spec.block_nbytes)
    measured = []
    with ThreadPoolExecutor(1) as threads:
        for plan in plans:
            codec = codec_for(plan, spec)
            found = paired(workload.copy, workload.calls(codec, threads, 1), rounds=1 if smoke else 11, warmups=1)
            encode, decode = (round(found[call].ratio, 3) for call in ("encode", "decode"))
            measured.append(Speed(plan, encode, decode, codec.nbytes(1)))
    return measured

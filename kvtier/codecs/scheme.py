"""How the elements of one part (K, V, or a latent) are stored: precision, and what shares a scale."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from kvtier.errors import ConfigError

EXACT = ("raw", "bf16", "fp16")
INTS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
FLOATS = ("e4m3", "e5m2")
PRECISIONS = (*EXACT, *INTS, *FLOATS)
GRANULARITIES = ("tensor", "token", "channel", "group")
OPTIONS = ("hadamard", "lloyd", "clip")
CHANNEL_TOKENS = 64
"""Tokens that share a channel's scale when nothing is said: the knee of error over overhead for 4-bit K."""
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
"""Largest finite value of each float of 8 bits."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store elements; `str()` is its canonical text, such as `int4/channel:64/asym`.

    Attributes:
        precision: "int8", "int4", "int3", "int2": integer codes; "e4m3", "e5m2": floats of 8 bits; "fp16", "bf16":
            rounded to that; "raw": the bits as they are.
        granularity: what shares a scale. "tensor": the part of a block; "token": one token of one KV head; "channel":
            one channel of one KV head over `group` tokens; "group": `group` consecutive channels of one token and head.
        group: see `granularity`; 0 where it does not apply.
        symmetric: no zero point.
        hadamard: rotated along head_dim first, by a scaled Hadamard matrix, its own inverse. Spreads what stands out in
            one channel over all: good for V at few bits, bad for K that has large constant channels (Qwen2.5).
        lloyd: the codes are the levels that are best for normal values (Max 1960), which rotated values nearly are.
        clip: the range is narrowed so that the squared error is least. For K only where the first token is exact.
    """

    precision: str
    granularity: str = ""
    group: int = 0
    symmetric: bool = True
    hadamard: bool = False
    lloyd: bool = False
    clip: bool = False

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Read `PRECISION/GRANULARITY[:N]/sym|asym[/hadamard][/lloyd][/clip]`, or "raw", "bf16", "fp16".

        Raises:
            ConfigError: what it is not, with the nearest thing that would be.
        """
        precision, *rest = (word.strip() for word in text.strip().split("/"))
        if precision not in PRECISIONS:
            raise ConfigError(f"no precision {precision!r} in {text!r}{_near(precision, PRECISIONS)}")
        if precision in EXACT:
            if rest:
                raise ConfigError(f"{text!r}: {precision} has no scale, so nothing follows it")
            return cls(precision)
        if len(rest) < 2 or rest[1] not in ("sym", "asym"):
            raise ConfigError(
                f"{text!r} is no scheme; write it as {precision}/token/sym or {precision}/channel:64/asym"
            )
        granularity, group = _granularity(rest[0], text)
        for option in rest[2:]:
            if option not in OPTIONS or rest.count(option) > 1:
                raise ConfigError(f"{text!r}: {option!r} is repeated or unknown{_near(option, OPTIONS)}")
        scheme = cls(precision, granularity, group, rest[1] == "sym", *(option in rest for option in OPTIONS))
        scheme._refuse_nonsense()
        return scheme

    def _refuse_nonsense(self) -> None:
        if self.lloyd and not (self.hadamard and self.symmetric and self.granularity == "token" and self.bits < 8):
            raise ConfigError(f"{self}: lloyd is for int4, int3 or int2, as in int4/token/sym/hadamard/lloyd")
        if self.clip and (self.precision not in INTS or self.lloyd or self.granularity == "tensor"):
            raise ConfigError(
                f"{self}: clip is for integers that a token, channel or group shares a scale of, without lloyd"
            )

    def __str__(self) -> str:
        if self.exact:
            return self.precision
        group = f":{self.group}" if self.group else ""
        options = [option for option in OPTIONS if getattr(self, option)]
        return "/".join([self.precision, self.granularity + group, "sym" if self.symmetric else "asym", *options])

    @property
    def exact(self) -> bool:
        """Whether there are no scales."""
        return self.precision in EXACT

    @property
    def bits(self) -> int:
        """Bits of one code; 0 for "raw", whose elements have the bits that they have."""
        return INTS.get(self.precision, {"raw": 0, "bf16": 16, "fp16": 16}.get(self.precision, 8))

    @property
    def integer(self) -> bool:
        """Whether the codes are integers with a uniform step."""
        return self.precision in INTS and not self.lloyd


def _granularity(text: str, whole: str) -> tuple[str, int]:
    name, colon, number = text.partition(":")
    if name not in GRANULARITIES:
        raise ConfigError(f"{whole!r}: no granularity {name!r}{_near(name, GRANULARITIES)}")
    if name in ("tensor", "token"):
        if colon:
            raise ConfigError(f"{whole!r}: {name} takes no number")
        return name, 0
    if name == "channel" and not colon:
        return name, CHANNEL_TOKENS
    if not re.fullmatch(r"[1-9][0-9]{0,5}", number) or int(number) < 2:
        raise ConfigError(f"{whole!r}: {name} needs how many share a scale, 2 or more, as in {name}:64")
    return name, int(number)


def _near(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"

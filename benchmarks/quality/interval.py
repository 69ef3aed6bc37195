"""A mean over texts, and how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
NORMAL = 1.96


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % confidence interval.

    Attributes:
        value: the mean.
        half: half the interval's width; None when one text alone says nothing about others.
    """

    value: float
    half: float | None


def mean(values: Sequence[float]) -> Mean:
    """Take the texts as a sample: their mean, and Student's t interval."""
    value = statistics.fmean(values)
    degrees = len(values) - 1
    if not degrees:
        return Mean(value, None)
    quantile = T[degrees - 1] if degrees <= len(T) else NORMAL
    return Mean(value, quantile * statistics.stdev(values) / math.sqrt(len(values)))

"""Means of few measurements, with their 95 % confidence intervals (Student's t)."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom. The last one is used for all
#: larger numbers, for which it is slightly too wide.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Interval:
    """A mean and its bounds; infinitely wide where one measurement is all there is."""

    mean: float
    low: float
    high: float


def of_mean(values: Sequence[float]) -> Interval:
    """values: at least one, independent of each other."""
    mean = statistics.fmean(values)
    margin = _margin(values)
    return Interval(mean, mean - margin, mean + margin)


def of_ratio(ratios: Sequence[float]) -> Interval:
    """The geometric mean. ratios: above 0; one of each pair of measurements."""
    logs = of_mean([math.log(ratio) for ratio in ratios])
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def _margin(values: Sequence[float]) -> float:
    freedom = len(values) - 1
    if freedom == 0:
        return math.inf
    t = _T[min(freedom, len(_T)) - 1]
    return t * statistics.stdev(values) / math.sqrt(len(values))

"""Samples of Prometheus metrics: parsing, differences and quantiles. Pure."""

import math
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

#: A sample's name and its sorted labels.
Key = tuple[str, tuple[tuple[str, str], ...]]
Samples = Mapping[Key, float]

_GROWING = ("_total", "_bucket", "_count", "_sum")


def parse(text: str, wanted: tuple[str, ...]) -> dict[Key, float]:
    """The samples whose names start with one of `wanted`. Raises ValueError.

    Left out are values that are not finite or beyond 64 bits: their sums could not be rounded.
    Other lines are skipped before parsing: vLLM's app has a thousand of them.
    """
    lines = [line for line in text.splitlines() if line.startswith(wanted)]
    families = text_string_to_metric_families("\n".join((*lines, "")))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in families
        for sample in family.samples
        if abs(sample.value) < 2**63
    }


def increases(before: Samples, after: Samples) -> dict[Key, float]:
    """The growth of each counter.

    Counters that did not grow are left out, except histogram buckets, which quantiles need
    all. A new counter, and one that is smaller than before (a restart), started at 0.
    """
    grown: dict[Key, float] = {}
    for key, value in after.items():
        if not key[0].endswith(_GROWING) or not math.isfinite(value):
            continue
        base = before.get(key, 0.0)
        growth = value - base if value >= base else value
        if growth > 0 or key[0].endswith("_bucket"):
            grown[key] = growth
    return grown


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over all samples with this name and these labels."""
    return sum(value for key, value in samples.items() if _is(key, name, labels))


def known(samples: Samples, name: str) -> float | None:
    """The value of a gauge without labels; None when it is absent or not finite."""
    value = samples.get((name, ()))
    return value if value is not None and math.isfinite(value) else None


def count(samples: Samples, histogram: str) -> int:
    return round(total(samples, f"{histogram}_count"))


def quantile(samples: Samples, histogram: str, share: float) -> float | None:
    """The quantile `share` as Prometheus estimates it; None without samples.

    Linear within a bucket; values above the largest finite bound count as that bound. Buckets
    of several series are added.
    """
    buckets: dict[float, float] = {}
    for (name, labels), value in samples.items():
        if name == f"{histogram}_bucket":
            bound = _bound(labels)
            buckets[bound] = buckets.get(bound, 0.0) + value
    return _interpolated(sorted(buckets.items()), share)


def _interpolated(buckets: Iterable[tuple[float, float]], share: float) -> float | None:
    """buckets: upper bounds and cumulated counts, sorted."""
    cumulated = list(buckets)
    if not cumulated or cumulated[-1][1] <= 0:
        return None
    rank = share * cumulated[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in cumulated:
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, max(below, count)
    return lower


def _bound(labels: tuple[tuple[str, str], ...]) -> float:
    try:
        return float(dict(labels)["le"])
    except (KeyError, ValueError):
        return math.inf


def _is(key: Key, name: str, labels: Mapping[str, str]) -> bool:
    return key[0] == name and labels.items() <= dict(key[1]).items()

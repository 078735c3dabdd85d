"""Samples of Prometheus pages, and how much counters have grown lately. Pure."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

#: A sample's name and its sorted labels.
Key = tuple[str, tuple[tuple[str, str], ...]]
Samples = Mapping[Key, float]


def parse(text: str, wanted: tuple[str, ...]) -> dict[Key, float]:
    """The samples whose names start with one of `wanted`. Raises ValueError.

    Left out are values that are not finite or beyond 64 bits: their sums could not be rounded.
    Other lines are skipped before parsing: vLLM's app has a thousand of them.
    """
    lines = [line for line in text.splitlines() if line.startswith(wanted)]
    found: dict[Key, float] = {}
    for family in text_string_to_metric_families("\n".join((*lines, ""))):
        for sample in family.samples:
            float(sample.labels.get("le", 0))  # whether the bound of a bucket is a number
            if abs(sample.value) < 2**63:
                found[sample.name, tuple(sorted(sample.labels.items()))] = float(sample.value)
    return found


def summed(pages: Iterable[Samples]) -> Samples:
    whole: dict[Key, float] = defaultdict(float)
    for samples in pages:
        for key, value in samples.items():
            whole[key] += value
    return whole


def by_labels(samples: Samples, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Sums over all samples with this name, by the values of these labels."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for (found, pairs), value in samples.items():
        if found == name:
            of = dict(pairs)
            sums[tuple(of.get(label, "") for label in labels)] += value
    return sums


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over all samples with this name and these labels."""
    return by_labels(samples, name, *labels).get(tuple(labels.values()), 0.0)


def quantile(samples: Samples, histogram: str, share: float) -> float | None:
    """The quantile `share` as Prometheus estimates it; None without samples.

    Linear within a bucket; values above the largest finite bound count as that bound. Buckets
    of several series are added.
    """
    sums = by_labels(samples, f"{histogram}_bucket", "le")
    buckets = sorted((float(bound), count) for (bound,), count in sums.items())
    rank = share * buckets[-1][1] if buckets else 0.0
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            part = 0.0 if math.isinf(bound) else (rank - below) / (count - below)
            return lower + (bound - lower) * part if part else lower
        lower, below = bound, max(below, count)
    return None


class CounterHistory:
    """The last page of each process, and the growth of all counters over the last `length_s`.

    Processes are identified by their source. Growth counts from a process's first page; after
    missing pages it includes what happened meanwhile. A counter that shrank was reset.
    """

    def __init__(self, length_s: float):
        self._length_s = length_s
        #: Of each source that is still present.
        self.latest: dict[str, Samples] = {}
        #: Time and length of the interval between two readings, and the growth in it.
        self._steps: deque[tuple[float, float, Samples]] = deque()
        self._last: float | None = None

    def add(self, now: float, pages: Mapping[str, Samples | None]) -> None:
        """Adds one reading.

        pages: of each source, None if it did not respond. A missing source has left; its growth
        stays.
        """
        grown: dict[Key, float] = defaultdict(float)
        for source, samples in pages.items():
            if samples is None or (before := self.latest.get(source)) is None:
                continue
            for key, value in samples.items():
                base = before.get(key, 0.0)
                grown[key] += value - base if value >= base else value
        kept = {source: page for source, page in self.latest.items() if source in pages}
        self.latest = kept | {s: page for s, page in pages.items() if page is not None}
        if self._last is not None:
            self._steps.append((now, now - self._last, grown))
        self._last = now
        while self._steps and self._steps[0][0] <= now - self._length_s:
            self._steps.popleft()

    def window(self, seconds: float) -> tuple[float, Samples]:
        """The growth in the newest intervals that fit into `seconds`, at least one, and how long
        they are together; 0: no growth is known yet."""
        covered, grown = 0.0, []
        for _, length_s, samples in reversed(self._steps):
            if covered and covered + length_s > seconds * 1.05:
                break
            covered += length_s
            grown.append(samples)
        return covered, summed(grown)

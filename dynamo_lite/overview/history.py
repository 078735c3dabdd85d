"""What the counters of all processes did lately. Pure: the time is an argument."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_lite.overview.samples import Key, Samples, increases


@dataclass(frozen=True)
class _Step:
    """What all counters together grew by from the last scrape until `at`, `seconds` later."""

    at: float
    seconds: float
    grown: Mapping[Key, float]


@dataclass(frozen=True)
class Window:
    """seconds: how long it really is, less than was asked for at the beginning; 0: nothing
    can be said yet."""

    seconds: float
    grown: Mapping[Key, float]

    def per_s(self, amount: float) -> float:
        return amount / self.seconds if self.seconds else 0.0


class History:
    """length_s: how far back it goes.

    A process is known by its source. Its first samples are where its growth begins; one
    that was away for a while grew by what it did meanwhile.
    """

    def __init__(self, length_s: float):
        self._length_s = length_s
        self._latest: dict[str, Samples] = {}
        self._steps: deque[_Step] = deque()
        self._last: float | None = None

    def add(self, now: float, scraped: Mapping[str, Samples | None]) -> None:
        """scraped: source to its samples, None where it did not answer. Who is not in it is
        gone; what it did stays in the window."""
        grown: dict[Key, float] = {}
        for source, samples in scraped.items():
            before = self._latest.get(source)
            if samples is None or before is None:
                continue
            for key, growth in increases(before, samples).items():
                grown[key] = grown.get(key, 0.0) + growth
        kept = {source: self._latest[source] for source in scraped if source in self._latest}
        self._latest = {**kept, **{s: v for s, v in scraped.items() if v is not None}}
        if self._last is not None:
            self._steps.append(_Step(now, now - self._last, grown))
        self._last = now
        while self._steps and self._steps[0].at <= now - self._length_s:
            self._steps.popleft()

    @property
    def latest(self) -> Mapping[str, Samples]:
        """Of each live process that has ever answered."""
        return self._latest

    def window(self, seconds: float) -> Window:
        """The growth of the newest steps, at least the last one, over about so long."""
        grown: dict[Key, float] = {}
        covered = 0.0
        for step in reversed(self._steps):
            if covered and covered + step.seconds > seconds * 1.05:
                break
            covered += step.seconds
            for key, growth in step.grown.items():
                grown[key] = grown.get(key, 0.0) + growth
        return Window(covered, grown)

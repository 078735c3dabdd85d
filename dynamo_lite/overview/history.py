"""Recent growth of the counters of all processes. Pure: the time is an argument."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_lite.overview.samples import Key, Samples, increases


@dataclass(frozen=True)
class _Step:
    """Growth of all counters between two scrapes, summed over processes."""

    #: Time of the second scrape.
    at: float
    #: Time between both.
    seconds: float
    grown: Mapping[Key, float]


@dataclass(frozen=True)
class Window:
    """Growth over the last seconds."""

    #: Actual length, which may differ from the requested one; 0: no growth is known yet.
    seconds: float
    #: Growth of each counter.
    grown: Mapping[Key, float]

    def per_s(self, amount: float) -> float:
        return amount / self.seconds if self.seconds else 0.0


class CounterHistory:
    """Growth over the last `length_s` seconds.

    Processes are identified by their source. Growth counts from a process's first samples;
    after missing scrapes it includes what happened meanwhile.
    """

    def __init__(self, length_s: float):
        self._length_s = length_s
        self._latest: dict[str, Samples] = {}
        self._steps: deque[_Step] = deque()
        self._last: float | None = None

    def add(self, now: float, scraped: Mapping[str, Samples | None]) -> None:
        """Adds one scrape.

        scraped: source to its samples, None if it did not respond. A missing source has left;
        its growth stays in the window.
        """
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
        """The last samples of each source that is still present."""
        return self._latest

    def window(self, seconds: float) -> Window:
        """Growth over about `seconds`: the newest steps that fit, at least one."""
        grown: dict[Key, float] = {}
        covered = 0.0
        for step in reversed(self._steps):
            if covered and covered + step.seconds > seconds * 1.05:
                break
            covered += step.seconds
            for key, growth in step.grown.items():
                grown[key] = grown.get(key, 0.0) + growth
        return Window(covered, grown)

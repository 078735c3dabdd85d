"""What requests need of the workers, from the ticks of the last minutes. Pure values.

Numbers of requests that run or wait tell of a higher load only after a while, and hide it while
memory is full. The rate of arrivals tells at once. So the planner learns what a request needs, and
multiplies that by the rate.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression, pstdev

#: Seconds whose ticks are kept.
_KEPT_S = 300.0
#: Seconds over which arrivals are counted: the window of `DecodeLoad.admitted_per_s`.
_RATE_S = 10.0
#: In standard deviations of the measured rate, for a Poisson process. The first is subtracted from
#: the rate, because the largest rate of a window counts. The second is the doubt of the rate.
_LEFT_OUT, _CHANCE = 0.4, 0.7
#: A line needs so many samples, and this spread of them, as a share of their mean.
_SAMPLES, _SPREAD = 5, 0.1


@dataclass(frozen=True, kw_only=True)
class Tick:
    """The load at one moment. Rates are per second. None: not known."""

    at: float
    admitted: float
    #: Requests without KV blocks.
    queued: float
    #: Output tokens, and uncached tokens for prefill workers.
    output: float | None = None
    prefill: float | None = None
    #: KV in whole workers, and the requests that hold it.
    kv: float | None = None
    running: float | None = None
    #: Mean number of requests that a worker ran, and their mean time between tokens.
    batch: float | None = None
    token_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a request needs, as far as it is known."""

    ticks: tuple[Tick, ...] = ()
    #: Arrivals per second; None: not known.
    per_s: float | None = None
    #: Time between tokens with no request, and what each request adds.
    pace: tuple[float, float] | None = None

    def add(self, tick: Tick) -> "Work":
        """With one tick more."""
        kept = (*(one for one in self.ticks if one.at > tick.at - _KEPT_S), tick)
        pace = _line(kept) or self.pace
        old = next(one for one in kept if one.at >= tick.at - _RATE_S - 1e-6)
        change = (tick.queued - old.queued) / (tick.at - old.at) if old.at < tick.at else 0.0
        rate = max(tick.admitted + change, 0.0)
        rate -= min(_LEFT_OUT * math.sqrt(rate / _RATE_S), rate)
        if self.per_s is not None and tick.queued > tick.admitted * _RATE_S:
            # The queue is long, so it may have reached its limit: then requests are rejected, and
            # nothing here counts them. A lower rate tells nothing.
            rate = max(rate, self.per_s)
        return Work(ticks=kept, per_s=rate, pace=pace)

    def unknown(self) -> "Work":
        """While the arrivals are not known."""
        return replace(self, per_s=None)

    @property
    def doubt(self) -> float:
        """How much of `per_s` may be chance, per second."""
        return _CHANCE * math.sqrt((self.per_s or 0.0) / _RATE_S)

    @property
    def output_tokens(self) -> float | None:
        """Of a request."""
        return _quotient((one.output, one.admitted) for one in self.ticks)

    @property
    def prefill_tokens(self) -> float | None:
        """Uncached tokens of a request that prefill workers should compute."""
        return _quotient((one.prefill, one.admitted) for one in self.ticks)

    def tokens_of_one(self, max_running: int | None) -> float | None:
        """Most output tokens per second of one decode worker; None: not known.

        `n / (fixed + each n)`, n: the most requests that its KV and `max_running` allow.
        """
        kv = _quotient((one.kv, one.running) for one in self.ticks)
        if self.pace is None or kv is None:
            return None
        fixed, each = self.pace
        most = 1 / kv
        if max_running:
            most = min(most, max_running)
        return most / (fixed + each * most)


def _quotient(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Of the sums of those that are known."""
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    above, below = sum(a for a, _ in known), sum(b for _, b in known)
    return above / below if above > 0 and below > 0 else None


def _line(ticks: Iterable[Tick]) -> tuple[float, float] | None:
    """The time between tokens by requests of a worker. None with few samples, with all of them at
    about the same number, and when the time falls with the number: such a line is meaningless."""
    known = [(t.batch, t.token_s) for t in ticks if t.batch is not None and t.token_s is not None]
    x, y = [batch for batch, _ in known], [token_s for _, token_s in known]
    if len(x) < _SAMPLES or pstdev(x) <= _SPREAD * fmean(x):
        return None
    slope, intercept = linear_regression(x, y)
    return (intercept, slope) if slope > 0 and intercept > 0 else None

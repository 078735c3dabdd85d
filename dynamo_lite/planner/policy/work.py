"""What requests need of the workers, learnt from tick to tick. Pure values.

Numbers of requests that run or wait tell of a higher load only after a while, and hide it while
memory is full. The rate of arrivals tells at once. So the planner learns what a request needs, and
multiplies that by the rate.
"""

import math
from dataclasses import dataclass, field, replace

#: Weights of the earlier ticks when one is added. Output tokens come some seconds after their
#: requests, so their mean must not follow a sudden load.
_FAST_FADE, _FADE, _SLOW_FADE = 0.95, 0.98, 0.99
#: Number of seconds over which the change of the queue counts.
_QUEUE_S = 10.0
#: A rate that differs from its level by more than this many standard deviations of a Poisson
#: process is another load, and any other one is noise.
_CHANCE = 3.0
#: Gain of the level of the arrivals, small since they are noise for the most part. With it the
#: standard deviation of the slope (per second) is this share of that of a rate, of which two in a
#: row overlap.
_ALPHA, _LEVEL_CHANCE, _SLOPE_CHANCE = 0.1, 0.4, 0.0034
#: Standard deviations beyond which a difference counts.
_SURE = 2.0
#: Of the slope: beyond these the arrivals surely rise.
_RISES = 4.0
#: A slope says nothing of a time that is farther away, in seconds.
_FARTHEST_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Level and slope of the arrivals, which are sampled now and then."""

    #: Time of the last sample; None before the first.
    at: float | None = None
    level: float = 0.0
    #: Per second.
    slope: float = 0.0

    def add(self, value: float, now: float) -> "Trend":
        """Returns the trend with one more sample. now: monotonic seconds, after the sample
        before.

        The gains are those of a steady Kalman filter with a constant slope (Kalata, "The tracking
        index", 1984).
        """
        if self.at is None or now <= self.at:
            return replace(self, at=now, level=value)
        seconds = now - self.at
        expected = max(self.level + self.slope * seconds, 0.0)
        surprise = value - expected
        return Trend(
            at=now,
            level=expected + _ALPHA * surprise,
            slope=self.slope + _ALPHA**2 / (2 - _ALPHA) * surprise / seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Line:
    """A straight line through fading samples (x, y), by least squares."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, fade: float = 0.98) -> "Line":
        return Line(
            weight=self.weight * fade + 1,
            x=self.x * fade + x,
            y=self.y * fade + y,
            xx=self.xx * fade + x * x,
            xy=self.xy * fade + x * y,
        )

    def fit(self) -> tuple[float, float] | None:
        """Intercept and slope; None with fewer than five samples, with all of them at about the
        same x, and when y falls with x: such a line is meaningless."""
        if self.weight < 4.5:
            return None
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x**2
        if variance <= (0.1 * mean_x) ** 2:
            return None
        slope = (self.xy / self.weight - mean_x * mean_y) / variance
        return (mean_y - slope * mean_x, slope) if slope > 0 else None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Quotient of two fading sums."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float, fade: float) -> "Ratio":
        return Ratio(above=self.above * fade + above, below=self.below * fade + below)

    @property
    def value(self) -> float | None:
        return self.above / self.below if self.below > 0 and self.above > 0 else None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a request needs, as far as it is known."""

    #: Per admitted request: output tokens, and uncached tokens for prefill workers.
    output_tokens: Ratio = field(default_factory=Ratio)
    prefill_tokens: Ratio = field(default_factory=Ratio)
    #: Per running request: KV in whole workers.
    kv: Ratio = field(default_factory=Ratio)
    #: Mean time between tokens by running requests per worker.
    token_s: Line = field(default_factory=Line)
    #: Its last intercept and slope.
    pace: tuple[float, float] | None = None
    #: Times and requests without KV blocks.
    queued: tuple[tuple[float, float], ...] = ()
    #: Arrivals per second, without their noise; None: not known.
    per_s: float | None = None
    #: Standard deviation of a measured rate, and the direction in which the last one differed by
    #: more than chance.
    chance: float = 0.0
    jump: int = 0
    trend: Trend = field(default_factory=Trend)

    def arrived(self, admitted_per_s: float, queued: float, now: float) -> "Work":
        """With one tick more: what was admitted, and by how much the queue has changed."""
        kept = tuple(one for one in self.queued if one[0] >= now - _QUEUE_S - 1e-6)
        change = (queued - kept[0][1]) / (now - kept[0][0]) if kept and now > kept[0][0] else 0.0
        per_s = max(admitted_per_s + change, 0.0)
        if queued > admitted_per_s * _QUEUE_S and self.per_s and per_s < self.trend.level:
            # The queue is long, so it may have reached its limit: then requests are rejected, and
            # nothing here counts them. A lower rate tells nothing.
            return replace(self, queued=(*kept, (now, queued)))
        trend = self.trend.add(per_s, now)
        # The standard deviation of a rate, for a Poisson process.
        chance = math.sqrt(max(per_s, trend.level, 0.0) / _QUEUE_S)
        away = per_s - trend.level
        jump = 0 if abs(away) <= _CHANCE * chance else 1 if away > 0 else -1
        if jump:
            # It is no trend: taken for one, it would be expected to go on.
            level = per_s if jump == self.jump else trend.level
            trend = replace(trend, level=level, slope=self.trend.slope)
        return replace(
            self,
            queued=(*kept, (now, queued)),
            per_s=per_s if jump else max(trend.level, 0.0),
            chance=chance,
            jump=jump,
            trend=trend,
        )

    def served(
        self, admitted_per_s: float, *, tokens_per_s: float | None, prefill_per_s: float | None
    ) -> "Work":
        """With what the requests of a tick have needed, in tokens per second."""
        made = self
        if tokens_per_s is not None:
            output = self.output_tokens.add(tokens_per_s, admitted_per_s, _SLOW_FADE)
            made = replace(made, output_tokens=output)
        if prefill_per_s is not None:
            prefill = self.prefill_tokens.add(prefill_per_s, admitted_per_s, _FAST_FADE)
            made = replace(made, prefill_tokens=prefill)
        return made

    def ran(self, tokens_per_s: float, token_s: float, workers: int) -> "Work":
        """With a tick's rate of tokens and time between them, of workers that are old enough.

        By Little's law that many requests ran at a time as the product says. The number that runs
        at the end of the tick is another one, and would make the line flatter than it is.
        """
        line = self.token_s.add(tokens_per_s * token_s / workers, token_s)
        if (fitted := line.fit()) is not None and fitted[0] > 0:
            return replace(self, token_s=line, pace=fitted)
        return replace(self, token_s=line)

    def held(self, kv: float, running: float) -> "Work":
        """With the KV that running requests held at a tick."""
        return replace(self, kv=self.kv.add(kv, running, _FADE))

    @property
    def doubt(self) -> float:
        """How much of `per_s` may be chance, per second. Less while the arrivals surely rise: a
        late order costs more then."""
        rises = self.trend.slope > _RISES * _SLOPE_CHANCE * self.chance
        return _SURE * _LEVEL_CHANCE * self.chance * (0.5 if rises else 1.0)

    def growth(self, seconds: float) -> float:
        """Factor on the arrivals after `seconds`; at least 1. Falls are not expected: the load may
        stay."""
        if not self.per_s:
            return 1.0
        slope = self.trend.slope - _SURE * _SLOPE_CHANCE * self.chance
        return 1 + max(slope, 0.0) * min(seconds, _FARTHEST_S) / self.per_s

    def tokens_of_one(self, max_running: int | None) -> float | None:
        """Most output tokens per second of one decode worker; None: not known.

        `n / (fixed + each n)`, n: the most requests that its KV and `max_running` allow.
        """
        kv = self.kv.value
        if self.pace is None or kv is None:
            return None
        fixed, each = self.pace
        most = 1 / kv
        if max_running:
            most = min(most, max_running)
        return most / (fixed + each * most)

"""A planner's forecast of a load, and of a latency that grows with the load. Pure values."""

import math
from dataclasses import dataclass, replace

#: Only the part of a rise that exceeds this many standard deviations of the surprises counts. With
#: a smaller number, a single step of the load would be taken for a ramp.
_NOISE = 3
#: Factor on the weight of all earlier surprises when a new one is added.
_FADE = 0.9
#: Longest time in seconds for which a slope is extrapolated.
_FARTHEST_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Level and slope of a series that is sampled now and then."""

    #: Time of the last sample; None before the first.
    at: float | None = None
    level: float = 0.0
    #: Per second.
    slope: float = 0.0
    #: Fading mean of the squared surprises.
    variance: float = 0.0
    #: Share of a surprise that enters the level. The matching share for the slope is
    #: `alpha^2 / (2 - alpha)`: the gains of a steady Kalman filter with a constant slope (Kalata,
    #: "The tracking index", 1984).
    alpha: float = 0.25

    def add(self, value: float, now: float) -> "Trend":
        """Returns the trend with one more sample. now: monotonic seconds, after the sample
        before."""
        if self.at is None or now <= self.at:
            return replace(self, at=now, level=value)
        seconds = now - self.at
        expected = max(self.level + self.slope * seconds, 0.0)
        surprise = value - expected
        beta = self.alpha**2 / (2 - self.alpha)
        return replace(
            self,
            at=now,
            level=expected + self.alpha * surprise,
            slope=self.slope + beta * surprise / seconds,
            variance=_FADE * self.variance + (1 - _FADE) * surprise**2,
        )

    def rise(self, seconds: float) -> float:
        """By how much the value is expected to be higher in `seconds`; at least 0.

        Small rises are noise. No fall is forecast, because the load may stay. The level alone is
        not the present value, because it lags behind.
        """
        rise = self.slope * min(seconds, _FARTHEST_S) - _NOISE * math.sqrt(self.variance)
        return max(rise, 0.0)


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

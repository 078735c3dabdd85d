"""Weighted durations in buckets that grow by a fixed factor."""

import math

#: Width of a bucket, relative to its lower end.
_WIDTH = 0.01
_LEAST_S = 1e-6
_LOG = math.log1p(_WIDTH)


class Histogram:
    """Seconds with weights. A percentile is off by at most half a bucket, 0.5 %."""

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        self.weight = 0.0
        self.sum_s = 0.0

    def add(self, seconds: float, weight: float = 1.0) -> None:
        bucket = _bucket(seconds)
        self._weights[bucket] = self._weights.get(bucket, 0.0) + weight
        self.weight += weight
        self.sum_s += seconds * weight

    def add_series(self, first: float, growth: float, steps: int, weight: float) -> None:
        """`steps` durations, the first of which is `first`, and each later one `growth` more."""
        last = first + growth * (steps - 1)
        if _bucket(first) == _bucket(last):
            mean = (first + last) / 2
            self.add(mean, weight * steps)
            return
        done = 0
        while done < steps:
            value = first + growth * done
            upper = _LEAST_S * math.exp((_bucket(value) + 1) * _LOG)
            count = min(steps - done, max(1, math.ceil((upper - value) / growth)))
            self.add(value + growth * (count - 1) / 2, weight * count)
            done += count

    def copy(self) -> "Histogram":
        made = Histogram()
        made._weights = dict(self._weights)
        made.weight, made.sum_s = self.weight, self.sum_s
        return made

    def since(self, before: "Histogram") -> "Histogram":
        """What was added after `before` was copied from this."""
        made = Histogram()
        for bucket, weight in self._weights.items():
            if added := weight - before._weights.get(bucket, 0.0):
                made._weights[bucket] = added
        made.weight, made.sum_s = self.weight - before.weight, self.sum_s - before.sum_s
        return made

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.weight if self.weight else None

    @property
    def median_s(self) -> float | None:
        """The value that half of the weight does not exceed; None without values."""
        left = self.weight / 2
        for bucket in sorted(self._weights):
            left -= self._weights[bucket]
            if left <= 1e-9 * self.weight:
                return _LEAST_S * math.exp((bucket + 0.5) * _LOG)
        return None


def _bucket(seconds: float) -> int:
    return math.floor(math.log(seconds / _LEAST_S) / _LOG) if seconds > _LEAST_S else 0

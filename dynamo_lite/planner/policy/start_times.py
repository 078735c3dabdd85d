"""How long the last starts of a role have taken. Pure."""

from collections import deque

#: Starts that are remembered.
_REMEMBERED = 20
#: With fewer, their 95th percentile says nothing.
_FEWEST = 3


class StartTimes:
    """In seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        self._times.append(seconds)

    @property
    def median(self) -> float | None:
        """None before the first start."""
        times = sorted(self._times)
        return times[len(times) // 2] if times else None

    @property
    def p95(self) -> float | None:
        """The 95th percentile; None while there are too few."""
        times = sorted(self._times)
        if len(times) < _FEWEST:
            return None
        return times[min(len(times) * 95 // 100, len(times) - 1)]

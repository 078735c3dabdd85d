"""Which load is offered next, in the search for the highest one that a server holds."""

import math

#: A load is too high when it has not held so often in a row. For one time a pause of the machine
#: is enough.
TRIES = 2
#: The search ends without a result below this share of the first load.
_LEAST_SHARE = 1 / 8


class Ramp:
    """Doubles the load until one does not hold, at most to `most`; then halves the distance between
    the highest that has held and the lowest that has not, until it is `precision` of the former.

    load: the next one to offer; None when the search is over. held: the highest that has held, 0
    if none has.
    """

    def __init__(self, first: float, most: float, precision: float):
        self.load: float | None = min(first, most)
        self.held = 0.0
        self._least, self._most, self._precision = _LEAST_SHARE * first, most, precision
        self._too_high = math.inf
        self._failures = 0

    def note(self, *, held: bool) -> None:
        """What came of offering `load`."""
        assert self.load is not None
        if held:
            self.held = self.load
        else:
            self._failures += 1
            if self._failures < TRIES:
                return
            self._too_high = self.load
        self._failures = 0
        self.load = self._next()

    def _next(self) -> float | None:
        if self.held >= self._most:
            return None
        if not self.held:
            lower = self._too_high / 2
            return lower if lower >= self._least else None
        if self._too_high == math.inf:
            return min(2 * self.held, self._most)
        if self._too_high <= self.held * (1 + self._precision):
            return None
        return math.sqrt(self.held * self._too_high)

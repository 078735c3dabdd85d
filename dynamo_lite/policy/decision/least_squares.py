"""Recursive least squares with forgetting, robust against outliers, with coefficients >= 0.

The state are the weighted moments of the measurements (the information form of recursive least
squares), so a direction that was not measured lately keeps its last estimate: it is not forgotten,
and nothing overflows. Errors are relative: a measurement of twice the size may miss by twice as
much.

The first measurements have no prediction, so their errors are relative to themselves: low ones
weigh most, and where measurements are few and spread the fit is too low. It also follows slowly
when everything takes longer by a factor, because unusual errors are clipped. `mean_ratio` corrects
both: it clips only what is more than twice as expected.
"""

import math
from collections.abc import Callable, Sequence

#: Residuals are clipped at this many robust standard deviations.
_CLIP = 3.0
#: A normal distribution's standard deviation over its median absolute deviation.
_SIGMA_PER_MAD = 1.4826
#: Nothing is clipped before this many measurements, because there is no fit yet.
_FEW = 8
#: Measurements between two solutions, once there are some.
_SOLVE_EVERY = 16
#: For `mean_ratio`: weight of all earlier measurements of a kind when a new one is added.
_RATIO_FADE = 0.95
#: There a ratio counts up to so much more than 1, or up to what is usual if that is more.
_RATIO_CLIP = 1.0
#: Added to the diagonal of the scaled moments: features that always occur together share.
_RIDGE = 1e-6
#: Rescaled before it underflows.
_SMALLEST = 1e-120


class RunningMedian:
    """The median of the last few dozen values above 0, by steps of 5 % towards each new value."""

    _STEP = 1.05

    def __init__(self, first: float, least: float = 0.01, most: float = 10.0):
        self.value, self._least, self._most = first, least, most

    def add(self, value: float) -> None:
        moved = self.value * self._STEP if value > self.value else self.value / self._STEP
        self.value = min(max(moved, self._least), self._most)


class _Latest:
    """The latest measurements of one kind beside a fit that changes.

    measured, row: faded sums of the values and of their rows, both divided by what was predicted
    when they were added. So the mean ratio to a newer fit needs no old measurement.
    """

    def __init__(self, size: int):
        self.measured, self.row = 0.0, [0.0] * size
        #: Those from before there was a prediction: rows, values and weights.
        self._first: list[tuple[Sequence[float], float, float]] = []

    def add(
        self,
        row: Sequence[float],
        value: float,
        weight: float,
        predicted: float,
        predict: Callable[[Sequence[float]], float],
    ) -> None:
        """predicted: 0 while there is no prediction."""
        if predicted <= 0:
            self._first = [*self._first, (row, value, weight)][-_FEW:]
            return
        for early, its_value, its_weight in self._first:
            self._add(early, its_value, its_weight, predict(early))
        self._first = []
        self._add(row, value, weight, predicted)

    def _add(self, row: Sequence[float], value: float, weight: float, predicted: float) -> None:
        if predicted <= 0:
            return
        fade = _RATIO_FADE if weight == 1.0 else _RATIO_FADE**weight
        share = weight / predicted
        self.measured = self.measured * fade + share * value
        self.row = [old * fade + share * new for old, new in zip(self.row, row, strict=True)]


class _Moments:
    """Weighted moments of one kind of measurement, all of them divided by `unit`."""

    def __init__(self, size: int):
        self.products = [[0.0] * size for _ in range(size)]
        self.results = [0.0] * size
        self.unit = 1.0
        self.added = 0
        self.count = 0.0
        self.newest_at = -math.inf
        #: Median amount of the relative error.
        self.error = RunningMedian(0.3)
        self.latest = _Latest(size)

    def rescale(self) -> None:
        self.products = [[value * self.unit for value in row] for row in self.products]
        self.results = [value * self.unit for value in self.results]
        self.unit = 1.0


class LeastSquares:
    """value = sum of coefficient * feature.

    size: number of features. forgetting: weight of all earlier measurements of a kind when a new
    one of that kind is added. kinds: number of kinds. Each has moments of its own, so that many
    measurements of one kind do not displace the few of another.
    """

    def __init__(self, size: int, *, forgetting: float, kinds: int = 1):
        self._size, self._forgetting = size, forgetting
        self._kinds = [_Moments(size) for _ in range(kinds)]
        self._since = self._added = 0
        self.coefficients: tuple[float, ...] = (0.0,) * size
        #: Features with a coefficient above 0, their scales, and the Cholesky factor.
        self._active: list[int] = []
        self._scales: list[float] = []
        self._factor: list[list[float]] = []
        #: Features that were ever above 0.
        self._known: set[int] = set()

    def __repr__(self) -> str:
        return f"<LeastSquares {self.coefficients} +-{self.sigma():.0%}>"

    def sigma(self, kind: int = 0) -> float:
        """Robust standard deviation of the relative error of one measurement."""
        return _SIGMA_PER_MAD * self._kinds[kind].error.value

    def count(self, kind: int = 0) -> float:
        """Effective number of measurements of a kind: at most 1 / (1 - forgetting)."""
        return self._kinds[kind].count

    def newest_at(self, kind: int = 0) -> float:
        return self._kinds[kind].newest_at

    def predict(self, row: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.coefficients, map(float, row)))

    def mean_ratio(self, kind: int = 0) -> float:
        """Mean of measured / predicted by the present fit, over the latest few dozen measurements
        of a kind; 1 before there are enough. A prediction times this has the right mean."""
        latest = self._kinds[kind].latest
        predicted = self.predict(latest.row)
        return latest.measured / predicted if predicted > 0 else 1.0

    def add(
        self, row: Sequence[float], value: float, now: float, *, kind: int = 0, weight: float = 1.0
    ) -> None:
        """row: features >= 0. value: above 0. weight: of how many measurements it is the mean."""
        moments = self._kinds[kind]
        expected = self.predict(row) if moments.added >= _FEW else 0.0
        measured = value
        if expected > 0:
            error = value / expected - 1
            most = _CLIP * self.sigma(kind)
            moments.error.add(abs(error))
            value = expected * (1 + min(max(error, -most), most))
            measured = expected * (1 + min(error, max(most, _RATIO_CLIP)))
        if value <= 0:
            return
        moments.latest.add(row, measured, weight, expected, self.predict)
        moments.added += 1
        fade = self._forgetting if weight == 1.0 else self._forgetting**weight
        moments.unit *= fade
        moments.count = moments.count * fade + weight
        moments.newest_at = now
        if moments.unit < _SMALLEST:
            moments.rescale()
        size = expected if expected > 0 else value
        share = weight / (size * size * moments.unit)
        used = [i for i in range(self._size) if row[i]]
        for i in used:
            part = share * row[i]
            products = moments.products[i]
            moments.results[i] += part * value
            for j in used:
                if j >= i:
                    products[j] += part * row[j]
        self._known.update(used)
        self._added += 1
        self._since += 1
        if self._since >= (_SOLVE_EVERY if self._added > 2 * _SOLVE_EVERY else 1):
            self._solve()

    def variance(self, row: Sequence[float]) -> float:
        """Variance of the mean that `predict` returns: row' V row. Infinite where a feature of
        the row was never measured."""
        if any(value and i not in self._known for i, value in enumerate(row)):
            return math.inf
        total = 0.0
        solved: list[float] = []
        for position, i in enumerate(self._active):
            value = row[i] / self._scales[position]
            factor = self._factor[position]
            for j in range(position):
                value -= factor[j] * solved[j]
            value /= factor[position]
            solved.append(value)
            total += value * value
        return total * max(self.sigma(kind) for kind in range(len(self._kinds))) ** 2

    def _solve(self) -> None:
        """Non-negative: the feature with the most negative coefficient is left out until none is
        negative."""
        self._since = 0
        size = self._size
        products = [[0.0] * size for _ in range(size)]
        results = [0.0] * size
        for moments in self._kinds:
            unit = moments.unit
            for i in range(size):
                results[i] += moments.results[i] * unit
                for j in range(i, size):
                    products[i][j] += moments.products[i][j] * unit
        active = [i for i in range(size) if products[i][i] > 0]
        while active:
            scales = [math.sqrt(products[i][i]) for i in active]
            factor = _cholesky(products, active, scales)
            found = _solved(factor, [results[i] / s for i, s in zip(active, scales, strict=True)])
            least = min(range(len(active)), key=found.__getitem__)
            if found[least] >= 0:
                self._active, self._scales, self._factor = active, scales, factor
                values = [0.0] * size
                for i, value, scale in zip(active, found, scales, strict=True):
                    values[i] = value / scale
                self.coefficients = tuple(values)
                return
            del active[least]


def _cholesky(
    products: list[list[float]], active: list[int], scales: list[float]
) -> list[list[float]]:
    """The lower factor of the active part, scaled to a diagonal of 1."""
    factor: list[list[float]] = []
    for position, i in enumerate(active):
        row: list[float] = []
        for other in range(position + 1):
            j = active[other]
            low, high = (i, j) if i < j else (j, i)
            value = products[low][high] / (scales[position] * scales[other])
            if other == position:
                value += _RIDGE - sum(one * one for one in row)
                row.append(math.sqrt(max(value, _RIDGE)))
            else:
                value -= sum(map(float.__mul__, row, factor[other]))
                row.append(value / factor[other][other])
        factor.append(row)
    return factor


def _solved(factor: list[list[float]], right: list[float]) -> list[float]:
    """x of factor factor' x = right."""
    size = len(right)
    middle: list[float] = []
    for i in range(size):
        row = factor[i]
        middle.append((right[i] - sum(row[j] * middle[j] for j in range(i))) / row[i])
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(factor[j][i] * found[j] for j in range(i + 1, size))
        found[i] = (middle[i] - rest) / factor[i][i]
    return found

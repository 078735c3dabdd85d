"""The estimators of the learned costs: what they recover, and what does not disturb them."""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.policy.decision.least_squares import LeastSquares, RunningMedian
from dynamo_lite.policy.decision.step_time import StepLoad, StepTime, work_of

STEP = (0.01, 1.5e-5, 8e-10, 1e-4, 5e-8)


def load(rng: random.Random, prefills: float = 0.3) -> StepLoad:
    tokens, context = rng.randrange(10, 8000), rng.randrange(8000)
    streams = rng.randrange(1, 100)
    work = work_of(tokens, context) if rng.random() < prefills else work_of(0, 0)
    return StepLoad(work.tokens, work.attention, streams, streams * rng.randrange(100, 3000))


def seconds(load: StepLoad) -> float:
    return sum(a * b for a, b in zip(STEP, (1.0, *load), strict=True))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), outliers=st.sampled_from([0.0, 0.03]))
def test_the_coefficients_of_steps_are_found(seed: int, outliers: float):
    """Outliers are clipped in the fit. In `mean_ratio` each counts as twice what was expected, so
    a prediction is too long by their share of the latest steps of its kind: `with_prompts` and
    `without`, as faded sums of outliers and of all steps."""
    rng, times = random.Random(seed), StepTime()
    without, with_prompts = [0.0, 0.0], [0.0, 0.0]
    for number in range(3000):
        each = load(rng)
        noise, outlier = rng.lognormvariate(0, 0.05), rng.random() < outliers
        times.add(each, seconds(each) * noise * (20 if outlier else 1), float(number))
        latest = with_prompts if each.prefill_tokens else without
        latest[:] = 0.95 * latest[0] + outlier, 0.95 * latest[1] + 1
    for found, true in zip(times.fit.coefficients, STEP, strict=True):
        assert found == pytest.approx(true, rel=0.15)
    for _ in range(20):
        each = load(rng)
        decode_s = seconds(StepLoad(0, 0.0, each.streams, each.kv_tokens))
        expected = decode_s * (1 + without[0] / without[1])
        assert times.decode_s(each) == pytest.approx(expected, rel=0.05)
    work = work_of(3000, 1000)
    work_s = STEP[1] * work.tokens + STEP[2] * work.attention
    expected = work_s * (1 + with_prompts[0] / with_prompts[1])
    assert times.work_s(work) == pytest.approx(expected, rel=0.05)


def test_a_single_outlier_moves_nothing():
    fit = LeastSquares(2, forgetting=0.99)
    rng = random.Random(1)
    for number in range(200):
        tokens = rng.randrange(1, 1000)
        fit.add((1.0, tokens), 0.1 + 0.001 * tokens, float(number))
    before = fit.coefficients
    for _ in range(16):  # more than one solution is apart
        fit.add((1.0, 500), 60.0 if _ == 0 else 0.6, 201.0)
    assert fit.coefficients == pytest.approx(before, rel=0.05)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_no_coefficient_is_ever_negative(seed: int):
    rng = random.Random(seed)
    fit = LeastSquares(3, forgetting=0.95)
    for number in range(200):
        row = (1.0, rng.random() * 100, rng.random() * 10_000)
        fit.add(row, max(0.01, 1.0 - 0.008 * row[1] + rng.gauss(0, 0.2)), float(number))
        assert min(fit.coefficients) >= 0
        assert fit.predict(row) >= 0 and fit.variance(row) >= 0


def test_a_falling_slope_is_refused():
    fit = LeastSquares(2, forgetting=0.99)
    for number in range(100):
        fit.add((1.0, number), 10.0 - number / 20, float(number))
    assert fit.coefficients[1] == 0 and fit.coefficients[0] > 0


def test_what_was_is_forgotten():
    fit, rng = LeastSquares(2, forgetting=0.95), random.Random(3)
    for slope in (0.001, 0.003):
        for number in range(400):
            tokens = rng.randrange(100, 1000)
            fit.add((1.0, tokens), 0.05 + slope * tokens, float(number))
        assert fit.coefficients[1] == pytest.approx(slope, rel=0.05)


def remote(rng: random.Random) -> tuple[float, float, float]:
    tokens = rng.randrange(500, 8000)
    return 1.0, tokens, rng.randrange(16_000)


def remote_s(row: tuple[float, float, float]) -> float:
    return 0.05 + 2.5e-5 * row[1] + 1e-6 * row[2]


@pytest.mark.parametrize("sigma", [0.05, 0.5])
def test_few_spread_measurements_are_right_on_average(sigma: float):
    off: list[float] = []
    for seed in range(100):
        rng, fit = random.Random(seed), LeastSquares(3, forgetting=0.99)
        for number in range(20):
            row = remote(rng)
            noise = rng.lognormvariate(-sigma * sigma / 2, sigma)
            fit.add(row, remote_s(row) * noise, float(number))
        rows = [remote(rng) for _ in range(10)]
        off += [fit.predict(row) * fit.mean_ratio() / remote_s(row) for row in rows]
    assert statistics.fmean(off) == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
def test_a_factor_is_learned_within_a_few_dozen_measurements(factor: float):
    rng, fit = random.Random(6), LeastSquares(3, forgetting=0.99)
    for number in range(240):
        row = remote(rng)
        slower = 1.0 if number < 200 else factor
        fit.add(row, slower * remote_s(row) * rng.lognormvariate(0, 0.05), float(number))
    rows = [remote(rng) for _ in range(20)]
    off = [fit.predict(row) * fit.mean_ratio() / remote_s(row) / factor for row in rows]
    assert statistics.fmean(off) == pytest.approx(1.0, abs=0.1)


def test_the_ratio_of_an_exact_fit_is_one_and_an_outlier_counts_as_twice_as_expected():
    rng, fit = random.Random(7), LeastSquares(3, forgetting=0.99)
    assert fit.mean_ratio() == 1.0
    for number in range(200):
        row = remote(rng)
        fit.add(row, remote_s(row), float(number))
    assert fit.mean_ratio() == pytest.approx(1.0, abs=1e-3)
    fit.add(row, 100 * remote_s(row), 200.0)
    assert fit.mean_ratio() == pytest.approx(1.0 + 1 / 20, abs=1e-3)  # of about twenty


def test_steps_that_take_longer_by_a_factor_are_predicted_so():
    rng, times = random.Random(8), StepTime()
    for number in range(700):
        each = load(rng)
        slower = 1.0 if number < 500 else 1.5
        times.add(each, slower * seconds(each), float(number))
    each = load(rng)
    decode = StepLoad(0, 0.0, each.streams, each.kv_tokens)
    assert times.decode_s(each) == pytest.approx(1.5 * seconds(decode), rel=0.1)
    work = work_of(3000, 1000)
    true_s = 1.5 * (STEP[1] * work.tokens + STEP[2] * work.attention)
    assert times.work_s(work) == pytest.approx(true_s, rel=0.1)


def test_one_kind_of_step_does_not_displace_the_other():
    rng, times = random.Random(4), StepTime()
    for _ in range(60):
        each = load(rng, prefills=1.0)
        times.add(each, seconds(each), 0.0)
    for _ in range(20_000):
        each = load(rng, prefills=0.0)
        times.add(each, seconds(each), 1.0)
    assert times.prefills == pytest.approx(60, rel=0.1)
    assert times.newest_prefill_at == 0.0
    work = work_of(4000, 0)
    assert times.work_s(work) == pytest.approx(STEP[1] * 4000 + STEP[2] * work.attention, rel=0.05)


def test_what_was_never_measured_is_unknown():
    fit = LeastSquares(3, forgetting=0.99)
    for number in range(50):
        fit.add((1.0, number, 0.0), 1.0 + number, 0.0)
    assert fit.variance((1.0, 10.0, 0.0)) < 1
    assert math.isinf(fit.variance((1.0, 10.0, 1.0)))


def test_the_median_follows():
    median, rng = RunningMedian(0.3), random.Random(5)
    for _ in range(500):
        median.add(rng.lognormvariate(math.log(0.05), 0.5))
    assert median.value == pytest.approx(0.05, rel=0.4)

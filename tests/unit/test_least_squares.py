"""The estimators of the learned costs: what they recover, and what does not disturb them."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.policy.least_squares import LeastSquares, RunningMedian
from dynamo_lite.policy.step_time import StepLoad, StepTime, work_of

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
    rng, times = random.Random(seed), StepTime()
    for number in range(3000):
        each = load(rng)
        noise = rng.lognormvariate(0, 0.05) * (20 if rng.random() < outliers else 1)
        times.add(each, seconds(each) * noise, float(number))
    for found, true in zip(times.fit.coefficients, STEP, strict=True):
        assert found == pytest.approx(true, rel=0.25)
    for _ in range(20):
        each = load(rng)
        decode = StepLoad(0, 0.0, each.streams, each.kv_tokens)
        assert times.decode_s(each) == pytest.approx(seconds(decode), rel=0.1)
        work = work_of(3000, 1000)
        true_s = STEP[1] * work.tokens + STEP[2] * work.attention
        assert times.work_s(work) == pytest.approx(true_s, rel=0.1)


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

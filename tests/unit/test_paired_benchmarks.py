"""What the paired benchmarks compute of their measurements."""

import math
import random

import pytest

from benchmarks import intervals, stalled


def test_the_interval_is_that_of_students_t():
    # t for two degrees of freedom: 4.303. The standard error of these is 1 / sqrt(3).
    found = intervals.of_mean([1.0, 2.0, 3.0])
    margin = 4.303 / math.sqrt(3)
    assert found == intervals.Interval(2.0, 2.0 - margin, 2.0 + margin)


def test_one_measurement_tells_nothing_about_its_error():
    assert intervals.of_mean([3.0]) == intervals.Interval(3.0, -math.inf, math.inf)
    assert intervals.of_ratio([3.0]).mean == pytest.approx(3.0)


@pytest.mark.parametrize("count", [2, 5, 40])
def test_nineteen_of_twenty_intervals_contain_the_mean(count: int):
    rng, runs = random.Random(count), 2000
    inside = 0
    for _ in range(runs):
        found = intervals.of_mean([rng.gauss(7.0, 2.0) for _ in range(count)])
        inside += found.low <= 7.0 <= found.high
    assert inside / runs == pytest.approx(0.95, abs=0.02)


def test_a_ratio_and_its_inverse_cancel_out():
    found = intervals.of_ratio([0.5, 2.0])
    assert found.mean == pytest.approx(1.0)
    assert found.low == pytest.approx(1 / found.high)


def test_a_stalled_pair_compares_the_slowest_prompts():
    off, on = (
        stalled.Play([100.0] * 99 + [4000.0] * 2, 0.0),
        stalled.Play([100.0] * 99 + [2000.0] * 2, 5.0),
    )
    assert stalled.ratios([{"off": off, "on": on}]) == [pytest.approx(0.5)]

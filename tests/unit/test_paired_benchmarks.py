"""What the paired benchmarks compute of their measurements, and the load that they make."""

import math
import random
import statistics

import pytest

from benchmarks import intervals, mixed, stalled


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


def test_a_mixed_load_is_the_same_for_both_plays_of_a_pair():
    plan = mixed.arrivals(20.0, seed=1)
    assert plan == mixed.arrivals(20.0, seed=1) != mixed.arrivals(20.0, seed=2)
    assert [one.at_s for one in plan] == sorted(one.at_s for one in plan)
    short, long = ([one for one in plan if one.long is kind] for kind in (False, True))
    assert len(short) > len(long) > 0
    assert statistics.mode(one.at_s for one in plan) == 10.0  # the burst
    for kind, (least, most) in ((short, mixed.SHORT), (long, mixed.LONG)):
        assert all(least <= one.prompt_tokens <= most for one in kind)


def test_a_simulated_pair_has_the_same_arrivals_on_both_sides():
    pair = mixed.simulated(5.0, seed=1)
    assert pair == mixed.simulated(5.0, seed=1)
    by, cost = pair["thresholds"], pair["cost"]
    assert len(by.short_s) == len(cost.short_s) and len(by.long_s) == len(cost.long_s) > 0
    assert sum(by.decisions.values()) == sum(cost.decisions.values()) == len(by.total_s)
    assert all(0 < first_s for first_s in (*by.first_s, *cost.first_s))


def test_a_mixed_pair_compares_means_by_kind_of_prompt():
    pair: mixed.Pair = {}
    for side, first_s in (("thresholds", 2.0), ("cost", 1.0)):
        pair[side] = mixed.Play()
        pair[side].add(mixed.Arrival(0.0, mixed.SHORT[0]), first_s, 4.0)
        pair[side].add(mixed.Arrival(0.0, mixed.LONG[1]), 3.0, 8.0)
    found = {name: mixed.ratios([pair], times) for name, times in mixed.ROWS.items()}
    assert found == {
        "first token": [2.0 / 2.5],
        "first token, short": [0.5],
        "first token, long": [1.0],
        "end to end": [1.0],
    }


def test_cost_and_regret_are_told_of_the_pairs_with_known_costs(capsys: pytest.CaptureFixture[str]):
    pair, unknown = (
        {side: mixed.Play([1.0], [2.0], [3.0, 4.0]) for side in mixed.SIDES} for _ in range(2)
    )
    for side, cost_s, regret_s in (("thresholds", 4.0, 1.0), ("cost", 2.0, 0.2)):
        play = pair[side]
        play.cost_s, play.regret_s, play.reliable = cost_s, regret_s, 2.0
    unknown["cost"].cost_s, unknown["cost"].reliable = 100.0, 1.0
    mixed.report([pair, unknown])
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "of 1 pairs with known costs" in said
    assert "cost of a decision 0.50 x (0.00 to inf) thresholds 2000 ms, cost 1000 ms" in said
    assert any(line.startswith("regret, thresholds 25.0%") for line in said)
    assert any(line.startswith("regret, cost 10.0%") for line in said)


def test_a_stalled_pair_compares_the_slowest_prompts():
    off, on = (
        stalled.Play([100.0] * 99 + [4000.0] * 2, 0.0),
        stalled.Play([100.0] * 99 + [2000.0] * 2, 5.0),
    )
    assert stalled.ratios([{"off": off, "on": on}]) == [pytest.approx(0.5)]

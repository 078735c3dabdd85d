"""The shipped planner on simulated graphs: its numbers, and what it costs."""

from benchmarks.capacity.fleet import WorkerCounts
from benchmarks.planner import Case, play
from dynamo_lite.protocol.options import PlannerOptions


def test_a_step_costs_few_requests_and_few_workers():
    case = Case("step", 1, duration_s=1800.0, start_s=20.0)
    one, peak = play(case, None), play(case, WorkerCounts(3, 6))
    assert one.attained >= 0.95
    # Most of this half hour is at the peak, and it begins and ends with workers that start or wait.
    assert one.gpu_s < 1.1 * peak.gpu_s


def test_after_a_step_the_numbers_fit_with_the_first_order():
    one = play(Case("step", 0, duration_s=1500.0), None)
    assert one.converged_s is not None
    assert one.converged_s <= 60.0 + 3 * PlannerOptions().tick_s

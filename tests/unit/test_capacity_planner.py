"""The shipped planner on simulated graphs: its limits, its numbers, and what it costs."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner import SLO, Case, convergence, play, reversals
from dynamo_lite.capacity.compare import Setting, run_variant, variant
from dynamo_lite.capacity.options import GraphModelOptions, WorkerCounts
from dynamo_lite.capacity.report import summary
from dynamo_lite.capacity.run import Result
from dynamo_lite.capacity.timing import read_timing
from dynamo_lite.capacity.traces import Shape, generate
from dynamo_lite.cli.capacity_run import planner_options
from dynamo_lite.protocol.options import PlannerOptions

#: Six times slower engines: few requests fill them.
TIMING = read_timing("gpu_like")
SLOW = msgspec.structs.replace(TIMING, step=TIMING.step.scaled(6.0))


ONE_EACH = WorkerCounts(1, 1)


def setting(kind: str, *, seed: int = 0, counts: WorkerCounts = ONE_EACH, **changes) -> Setting:
    shape = Shape(
        kind=kind,
        duration_s=changes.pop("duration_s", 900.0),
        rate=changes.pop("rate", 0.5),
        peak=changes.pop("peak", 2.0),
        prompt_tokens=6000,
        output_tokens=250,
    )
    made = Setting(
        requests=generate(shape, block_tokens=512, seed=seed).requests,
        timing=SLOW,
        options=GraphModelOptions(router="kv", slo=SLO, seed=seed),
        counts=counts,
        most_workers=12,
        start_s=30.0,
    )
    return replace(made, **changes)


def played(one: Setting, name: str = "planner") -> Result:
    return run_variant(variant(name, one), one)


def test_the_same_seed_is_the_same_report():
    first, again = (summary(played(setting("step")), SLO) for _ in range(2))
    assert first == again
    assert first["starts"] > 0


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(["step", "burst", "sine"]),
    seed=st.integers(0, 1000),
    budget=st.integers(2, 9),
    least=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    most=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    start_s=st.sampled_from([1.0, 30.0, 200.0]),
)
def test_numbers_stay_within_their_limits_and_no_request_is_lost(
    kind: str,
    seed: int,
    budget: int,
    least: tuple[int, int],
    most: tuple[int, int],
    start_s: float,
):
    limits = PlannerOptions(
        budget_devices=max(budget, sum(least)),
        prefill_min=least[0],
        decode_min=least[1],
        prefill_max=most[0],
        decode_max=most[1],
        start_s=start_s,
    )
    one = setting(
        kind,
        seed=seed,
        counts=WorkerCounts(*least),
        duration_s=600.0,
        planner=limits,
        start_s=start_s,
    )
    result = played(one)
    for sample in result.samples:
        devices = sample.prefill + sample.decode + sample.starting + sample.draining
        assert devices <= limits.budget_devices
        assert least[0] <= sample.prefill <= most[0]
        assert least[1] <= sample.decode <= most[1]
    for change in result.changes:
        assert least[0] <= change.wanted.prefill <= most[0]
        assert least[1] <= change.wanted.decode <= most[1]
    records = result.records
    assert records.completed + records.refused == len(one.requests)


def test_drained_workers_finish_what_they_have():
    result = played(setting("burst", duration_s=1200.0))
    records, graph = result.records, result.graph
    assert graph.prefill.stops + graph.decode.stops > 0
    assert records.unfinished == 0
    assert graph.in_flight == 0


def test_without_prefill_workers_it_plans_decode_workers_alone():
    result = played(setting("step", counts=WorkerCounts(0, 1)))
    assert {change.wanted.prefill for change in result.changes} == {0}
    assert max(change.wanted.decode for change in result.changes) > 1


def test_its_options_can_be_changed_by_name():
    one = setting("burst", duration_s=1200.0)
    soon, late = (played(one, f"planner:down-window-s={s}") for s in (30, 400))
    assert device_seconds(soon) < device_seconds(late)


def test_its_options_are_those_of_a_configuration():
    limits = planner_options(Path("configs/disagg_planner.yaml"))
    assert (limits.budget_devices, limits.decode_max, limits.start_s) == (4, 3, 20.0)
    one = replace(setting("step"), planner=limits)
    assert max(sample.decode for sample in played(one).samples) <= 3


def device_seconds(result: Result) -> float:
    return result.graph.prefill.device_seconds() + result.graph.decode.device_seconds()


def test_a_step_costs_few_requests_and_few_workers():
    case = Case("step", 1, duration_s=1800.0, start_s=20.0)
    one, peak = play(case, "planner"), play(case, "static:3P6D")
    assert one.attained >= 0.95
    # Most of this half hour is at the peak, and it begins and ends with workers that start or wait.
    assert one.gpu_s < 1.1 * peak.gpu_s


def test_after_a_step_the_numbers_fit_with_the_first_order():
    one = play(Case("step", 0, duration_s=1500.0), "planner")
    assert one.converged_s is not None
    assert one.converged_s <= 60.0 + 3 * PlannerOptions().tick_s


def test_a_constant_load_has_no_reversal():
    one = play(Case("constant", 3, duration_s=1800.0), "planner")
    assert (one.reversals, one.attained > 0.95) == (0, True)


def test_reversals_are_changes_in_the_other_direction_within_ten_minutes():
    assert reversals([(0, 1), (100, 3), (200, 4), (300, 3)]) == 1
    assert reversals([(0, 1), (100, 3), (699, 2), (1300, 3)]) == 1
    assert reversals([(0, 2), (50, 1), (60, 0)]) == 0


def test_numbers_have_converged_when_they_stay_within_one():
    prefill = [(0.0, 1), (610.0, 3)]
    decode = [(0.0, 2), (615.0, 5), (700.0, 7), (800.0, 6)]
    # Ready 60 s after their orders; 7 are ready at 760, and 6 are left at 800.
    assert convergence([prefill, decode], 600.0, 60.0) == pytest.approx(160.0)
    assert convergence([[(0.0, 1)], [(0.0, 2)]], 600.0, 60.0) is None

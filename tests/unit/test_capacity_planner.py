"""The shipped planner on simulated graphs: its limits, its numbers, and what it costs."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.capacity.fleet import WorkerCounts
from benchmarks.capacity.graph import GraphModel
from benchmarks.capacity.load import Shape
from benchmarks.capacity.run import Result, Run, Setting
from benchmarks.capacity.scaler import PlannerScaler
from benchmarks.capacity.timing import GPU_LIKE
from benchmarks.planner import Case, convergence, play, reversals
from dynamo_lite.protocol.options import PlannerOptions

#: Six times slower engines: few requests fill them.
SLOW = replace(GPU_LIKE, step=GPU_LIKE.step.scaled(6.0))
LIMITS = PlannerOptions(budget_devices=12, prefill_max=12, decode_max=12, start_s=30.0)


def setting(kind: str, *, seed: int = 0, duration_s: float = 900.0, start_s=30.0) -> Setting:
    shape = Shape(
        kind=kind,
        duration_s=duration_s,
        rate=0.5,
        peak=2.0,
        prompt_tokens=6000,
        output_tokens=250,
    )
    return Setting(
        requests=shape.requests(seed), timing=SLOW, most_workers=12, start_s=start_s, seed=seed
    )


class Watched(PlannerScaler):
    """A planner that keeps the numbers of each tick: ready ones, and all devices."""

    def __init__(self, limits: PlannerOptions):
        super().__init__(limits)
        self.seen: list[tuple[int, int, int]] = []

    def tick(self, graph: GraphModel, now: float) -> WorkerCounts:
        devices = graph.prefill.devices + graph.decode.devices
        self.seen.append((len(graph.prefill.ready), len(graph.decode.ready), devices))
        return super().tick(graph, now)


def played(one: Setting, limits: PlannerOptions = LIMITS) -> Result:
    counts = WorkerCounts(limits.prefill_min, limits.decode_min)
    return Run(one, counts, PlannerScaler(limits)).run()


def test_the_same_seed_is_the_same_run():
    first, again = (played(setting("step")) for _ in range(2))
    assert first.graph.records.total_s == again.graph.records.total_s
    assert first.changes == again.changes
    assert len(first.changes) > 1


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
    one = setting(kind, seed=seed, duration_s=600.0, start_s=start_s)
    planner = Watched(limits)
    result = Run(one, WorkerCounts(*least), planner).run()
    for prefill, decode, devices in planner.seen:
        assert devices <= limits.budget_devices
        assert least[0] <= prefill <= most[0]
        assert least[1] <= decode <= most[1]
    for _, wanted in result.changes:
        assert least[0] <= wanted.prefill <= most[0]
        assert least[1] <= wanted.decode <= most[1]
    records = result.graph.records
    assert records.completed + records.refused == len(one.requests)


def test_drained_workers_finish_what_they_have():
    one = setting("burst", duration_s=1200.0)
    result = played(one)
    wanted = [numbers.prefill + numbers.decode for _, numbers in result.changes]
    assert any(after < before for before, after in pairwise(wanted))
    records = result.graph.records
    assert records.completed + records.refused == len(one.requests)


def test_a_longer_down_window_costs_more():
    one = setting("burst", duration_s=1200.0)
    soon, late = (played(one, replace(LIMITS, down_window_s=s)) for s in (30, 400))
    assert soon.graph.device_seconds() < late.graph.device_seconds()


def test_its_options_are_checked():
    assert Case("step", 0, options={"down_window_s": "30"}).limits().down_window_s == 30
    for wrong in ({"tick": "5"}, {"tick_s": "x"}):
        with pytest.raises(ValueError, match=r"no option|tick_s"):
            Case("step", 0, options=wrong).limits()


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


def test_a_constant_load_has_no_reversal():
    one = play(Case("constant", 3, duration_s=1800.0), None)
    assert (one.reversals, one.attained > 0.95) == (0, True)


def test_the_benchmark_compares_the_planner_with_oracle_and_static_graphs(tmp_path: Path):
    found = tmp_path / "found.json"
    sizes = ("--loads=constant", "--duration=200", "--seeds=1", "--jobs=1", f"--json={found}")
    command = [sys.executable, "-m", "benchmarks.planner", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["attained", "constant"]
    [row] = json.loads(found.read_text())["constant"]
    assert row.keys() == {"case", "planner", "oracle", "static"}
    assert min(row[who]["attained"] for who in ("planner", "oracle")) > 0.9
    assert row["static"]["attained"] >= row["planner"]["attained"]


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

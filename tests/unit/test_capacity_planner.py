"""The shipped planner on simulated graphs: its limits, its numbers, and what it costs."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.capacity.fleet import WorkerCounts
from benchmarks.capacity.graph import GraphModel
from benchmarks.capacity.load import Shape
from benchmarks.capacity.run import Result, Run, Setting
from benchmarks.capacity.scaler import PlannerScaler
from benchmarks.capacity.timing import GPU_LIKE
from benchmarks.planner import Case, play
from dynamo_lite.protocol.options import PlannerOptions

#: Six times slower engines: few requests fill them.
SLOW = replace(GPU_LIKE, step=GPU_LIKE.step.scaled(6.0))
LIMITS = PlannerOptions(budget_devices=12, prefill_max=12, decode_max=12, start_s=30.0)


def setting(kind: str, *, seed: int = 0, duration_s: float = 900.0, start_s=30.0) -> Setting:
    shape = Shape(
        kind=kind, duration_s=duration_s, rate=0.5, peak=2.0, prompt_tokens=6000, output_tokens=250
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
    kind: str, seed: int, budget: int, least: tuple[int, int], most: tuple[int, int], start_s: float
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

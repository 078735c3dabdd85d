"""The simulated graph of `benchmarks.planner`: conservation, determinism, queueing theory."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.capacity.fleet import WorkerCounts
from benchmarks.capacity.graph import GraphModel, Slo
from benchmarks.capacity.load import Request, Shape
from benchmarks.capacity.oracle import Oracle
from benchmarks.capacity.run import Result, Run, Scaler, Setting
from benchmarks.capacity.timing import StepTiming, Timing
from dynamo_lite.protocol.options import DecisionThresholds

STEP = StepTiming(step_s=0.01, token_s=1e-5, attention_s=1e-9, stream_s=1e-4, kv_token_s=1e-8)
TIMING = Timing(
    step=STEP,
    kv_tokens=60_000,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    handover_s=0.003,
    commit_s=0.002,
    bytes_per_token=1000,
    bytes_per_s=1e9,
    frontend_s=0.005,
)


def setting(requests: list[Request], **changes) -> Setting:
    one = Setting(requests=requests, timing=TIMING, most_workers=1000, start_s=30.0)
    return replace(one, **changes)


def played(one: Setting, counts: WorkerCounts, scaler: Scaler | None = None) -> Result:
    return Run(one, counts, scaler).run()


def constant(rate: float, duration_s: float, **shape) -> list[Request]:
    return Shape(kind="constant", duration_s=duration_s, rate=rate, peak=rate, **shape).requests(1)


def test_a_local_request_takes_the_time_of_the_formula():
    graph = played(setting([Request(1.0, 400, 11)]), WorkerCounts(0, 1)).graph
    decode_s = sum(STEP.one(streams=1, kv=400 + i) for i in range(10))
    ttft_s = TIMING.prefill_s(400) + TIMING.frontend_s
    assert graph.records.ttft_s[0] == pytest.approx(ttft_s)
    assert graph.records.total_s[0] == pytest.approx(ttft_s + decode_s)


def test_a_remote_request_takes_the_time_of_the_formula():
    graph = played(setting([Request(1.0, 3000, 11)]), WorkerCounts(1, 1)).graph
    step = STEP.one(tokens=2048, attention=2048 * 1024) + STEP.one(
        tokens=952, attention=952 * (2048 + 476)
    )
    ttft_s = 0.003 + step + TIMING.frontend_s
    assert graph.records.ttft_s[0] == pytest.approx(ttft_s)
    # The last chunk's bytes are sent after it; then the last prompt token and ten more.
    last_s = 2048 * 1000 / 1e9 + 0.002
    decode_s = sum(STEP.one(streams=1, kv=2999 + i) for i in range(11))
    assert graph.records.total_s[0] == pytest.approx(ttft_s + last_s + decode_s)
    assert graph.tally.asked_tokens == 3000
    assert graph.tally.gaps.weight == 10


def test_a_slow_network_is_waited_for():
    slow = replace(TIMING, handover_s=0.0, commit_s=0.0, bytes_per_s=1e6)
    requests = [Request(0.0, 3000, 1), Request(0.01, 3000, 1)]
    total_s = played(setting(requests, timing=slow), WorkerCounts(2, 1)).graph.records.total_s
    # Both write into the one decode worker: three seconds each.
    assert total_s[0] == pytest.approx(3.0, abs=0.05)
    assert total_s[1] == pytest.approx(6.0, abs=0.06)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_slot_waits_as_long_as_the_formula_of_m_d_1(load: float):
    timing = replace(
        TIMING, kv_tokens=10**6, max_num_seqs=1, max_num_batched_tokens=4096, frontend_s=0.0
    )
    service_s = timing.prefill_s(3000)
    requests = constant(load / service_s, 20_000 * service_s, sigma=0.0, prompt_tokens=3000)
    requests = [replace(one, output_tokens=1) for one in requests]
    records = played(setting(requests, timing=timing), WorkerCounts(0, 1)).graph.records
    assert records.completed == len(requests)
    waited_s = sum(records.ttft_s) / len(requests) - service_s
    # Pollaczek-Khinchine with equal services.
    assert waited_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.12)


def test_the_load_that_workers_can_carry_is_carried_and_no_more():
    service_s = TIMING.prefill_s(2000)
    thresholds = DecisionThresholds(max_prefill_queue_size=10**6)
    for load, kept in ((0.7, True), (1.5, False)):
        requests = constant(2 * load / service_s, 60.0, sigma=0.0, output_tokens=1)
        result = played(setting(requests, thresholds=thresholds), WorkerCounts(2, 4))
        late = [one for one in result.graph.records.ttft_s if one > 5.0]
        assert (not late) == kept


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    counts=st.sampled_from([WorkerCounts(*one) for one in ((0, 1), (1, 1), (2, 3), (3, 1))]),
    rate=st.floats(0.5, 60),
    kv=st.integers(9000, 60_000),
    timeout_s=st.sampled_from([0.05, 0.5, 30.0]),
)
def test_every_request_ends_once_and_nothing_is_left(
    seed: int, counts: WorkerCounts, rate: float, kv: int, timeout_s: float
):
    shape = Shape(
        kind="burst",
        duration_s=20,
        rate=rate / 4,
        peak=rate,
        prompt_tokens=900,
        output_tokens=60,
        sigma=0.8,
    )
    requests = shape.requests(seed)
    timing = replace(TIMING, kv_tokens=kv, max_num_seqs=16, max_num_batched_tokens=512)
    thresholds = DecisionThresholds(remote_prefill_timeout_s=timeout_s)
    one = setting(requests, timing=timing, thresholds=thresholds, seed=seed)
    graph = played(one, counts).graph
    records = graph.records
    assert records.completed + records.refused == len(requests)
    assert sum(not math.isnan(one) for one in records.total_s) == records.completed
    assert all(
        first <= total
        for first, total in zip(records.ttft_s, records.total_s, strict=True)
        if not math.isnan(total)
    )
    # A prompt that is preempted before its first token is decided again.
    again = sum(worker.engine.preemptions for worker in graph.decode.ready)
    assert records.completed <= graph.tally.admitted <= records.completed + again
    for worker in graph.decode.ready:
        assert worker.busy == worker.running == worker.engine.used == 0
    assert graph.queue.jobs == graph.queue.tokens == 0


def test_the_same_seed_is_the_same_run():
    one = setting(constant(8.0, 30.0))
    first, again, other = (
        played(one, WorkerCounts(2, 2)),
        played(one, WorkerCounts(2, 2)),
        played(replace(one, seed=9), WorkerCounts(2, 2)),
    )
    assert first.graph.records.total_s == again.graph.records.total_s
    assert first.graph.records.completed == other.graph.records.completed


def test_a_full_queue_makes_prompts_local():
    requests = [Request(i * 1e-4, 3000, 2) for i in range(40)]
    one = setting(requests, thresholds=DecisionThresholds(max_prefill_queue_size=5))
    tally = played(one, WorkerCounts(1, 4)).graph.tally
    assert tally.asked_tokens >= 5 * 3000
    assert tally.refused_tokens > 10 * 3000
    assert tally.asked_tokens + tally.refused_tokens == 40 * 3000


def test_a_prompt_that_fits_no_worker_is_refused():
    requests = [Request(0.0, 70_000, 5), Request(0.1, 100, 5)]
    records = played(setting(requests), WorkerCounts(1, 1)).graph.records
    assert (records.refused, records.completed) == (1, 1)
    assert records.attained(Slo(ttft_s=10.0, itl_s=1.0)) == 0.5


class Recorder:
    """A scaler that asks for numbers by time, and keeps what it saw: of each role the workers that
    are ready, that start and that drain."""

    tick_s = 10.0

    def __init__(self, wanted: dict[float, WorkerCounts]):
        self.wanted = wanted
        self.prefill: dict[float, tuple[int, list[float], int]] = {}
        self.decode: dict[float, tuple[int, list[float], int]] = {}
        self.youngest_s: dict[float, float | None] = {}

    def tick(self, graph: GraphModel, now: float) -> WorkerCounts:
        for seen, fleet in ((self.prefill, graph.prefill), (self.decode, graph.decode)):
            seen[now] = len(fleet.ready), fleet.starting_s, len(fleet.draining_s)
        self.youngest_s[now] = graph.decode.youngest_s
        return self.wanted[max(at for at in self.wanted if at <= now)]


def test_starts_take_their_time_and_drains_finish_their_requests():
    requests = constant(6.0, 200.0)
    scaler = Recorder(
        {0.0: WorkerCounts(1, 1), 40.0: WorkerCounts(3, 2), 120.0: WorkerCounts(1, 1)}
    )
    result = played(setting(requests, start_s=25.0), WorkerCounts(1, 1), scaler)
    assert scaler.prefill[50.0][:2] == (1, [10.0, 10.0])
    assert (scaler.prefill[70.0][0], scaler.decode[70.0][0]) == (3, 2)
    assert scaler.youngest_s[70.0] == pytest.approx(5.0)
    assert scaler.prefill[150.0] == scaler.decode[150.0] == (1, [], 0)
    assert result.graph.records.completed == len(requests)
    changes = [(at, str(wanted)) for at, wanted in result.changes]
    assert changes == [(0, "1P1D"), (40, "3P2D"), (120, "1P1D")]
    # One of each all the time; the others from their orders until they have drained.
    extra_s = result.graph.prefill.device_seconds() - result.ended_s
    assert 2 * 80 <= extra_s < 2 * 90


def test_a_start_that_is_no_longer_wanted_is_cancelled():
    scaler = Recorder({0.0: WorkerCounts(1, 3), 20.0: WorkerCounts(1, 1)})
    one = setting(constant(1.0, 100.0), start_s=60.0)
    result = played(one, WorkerCounts(1, 1), scaler)
    extra_s = result.graph.decode.device_seconds() - result.ended_s
    assert extra_s == pytest.approx(2 * 20.0)
    assert max(ready for ready, _, _ in scaler.decode.values()) == 1


def test_the_oracle_serves_a_step_with_less_than_the_numbers_for_its_peak():
    slo = Slo(ttft_s=2.0, itl_s=0.05)
    shape = Shape(kind="step", duration_s=300, rate=4.0, peak=16.0)
    one = setting(shape.requests(2), most_workers=16)
    oracle = Oracle(one, slo)
    result = played(one, oracle.at_start(), oracle)
    peak = played(one, WorkerCounts(4, 4))
    assert result.graph.records.attained(slo) > 0.95
    assert result.graph.device_seconds() < 0.8 * peak.graph.device_seconds()

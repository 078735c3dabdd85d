"""The simulated graph: conservation, determinism, queueing theory, scalers."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dynamo_lite.capacity.compare import Setting, parse_counts, run_variant, variant
from dynamo_lite.capacity.options import GraphModelOptions, Slo, WorkerCounts
from dynamo_lite.capacity.report import percentiles, summary
from dynamo_lite.capacity.request import TraceRequest, with_blocks
from dynamo_lite.capacity.run import Result, Run
from dynamo_lite.capacity.scaling import Bounds, ScalerInputs, ScalerProposal, Static, prefill_s
from dynamo_lite.capacity.timing import (
    FORMAT,
    EngineLimits,
    StepTiming,
    Timing,
    TransferTiming,
)
from dynamo_lite.capacity.traces import Shape, generate
from dynamo_lite.policy.routing.admission import Limits
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.options import DecisionThresholds
from dynamo_lite.queue.base import QueueOptions
from dynamo_lite.services.config import FrontendConfig, PrefillWorkerConfig, VllmWorkerConfig

STEP = StepTiming(step_s=0.01, token_s=1e-5, attention_s=1e-9, stream_s=1e-4, kv_token_s=1e-8)
TIMING = Timing(
    format=FORMAT,
    model="m",
    device="d",
    vllm_version="any",
    source="test",
    step=STEP,
    engine=EngineLimits(kv_tokens=60_000, max_num_seqs=64, max_num_batched_tokens=2048),
    transfer=TransferTiming(
        handover_s=0.003, commit_s=0.002, bytes_per_token=1000, bytes_per_s=1e9
    ),
    frontend_s=0.005,
    start_s=30.0,
)
OPTIONS = GraphModelOptions(block_tokens=64)
PLENTY = Bounds(least=WorkerCounts(0, 1), most=1000)


def played(
    requests: Sequence[TraceRequest],
    counts: WorkerCounts,
    options: GraphModelOptions = OPTIONS,
    timing: Timing = TIMING,
) -> Result:
    return Run(requests, timing, options, Static(counts), counts, PLENTY).run()


def constant(rate: float, duration_s: float, **shape: float) -> list[TraceRequest]:
    made = Shape(kind="constant", duration_s=duration_s, rate=rate, peak=rate, **shape)  # pyright: ignore[reportArgumentType]
    return generate(made, block_tokens=64, seed=1).requests


def test_the_defaults_are_those_of_the_services():
    frontend, decode, prefill = FrontendConfig, VllmWorkerConfig(), PrefillWorkerConfig()
    assert OPTIONS.router == frontend.router
    assert OPTIONS.routing == replace(OPTIONS.routing)
    assert OPTIONS.worker_limits == Limits(
        in_flight=decode.max_in_flight_requests, prompt_tokens=decode.max_queued_tokens
    )
    assert (OPTIONS.concurrency, OPTIONS.short_slots) == (prefill.concurrency, prefill.short_slots)
    assert OPTIONS.first_token_from_prefill == decode.first_token_from_prefill
    queue = QueueOptions()
    assert (OPTIONS.order, OPTIONS.short_length, OPTIONS.max_jobs) == (
        queue.order,
        queue.short_length,
        queue.max_jobs,
    )
    for name, value in vars(OPTIONS.thresholds).items():
        assert getattr(decode, name) == value


def test_a_local_request_takes_the_time_of_the_formula():
    result = played([TraceRequest(1.0, 400, 11)], WorkerCounts(0, 1))
    decode_s = sum(STEP.one(streams=1, kv=400 + i) for i in range(10))
    ttft_s = prefill_s(TIMING, 400) + TIMING.frontend_s
    assert result.records.ttft_s[0] == pytest.approx(ttft_s)
    assert result.records.total_s[0] == pytest.approx(ttft_s + decode_s)
    assert result.graph.tally.decisions == {("local", "short"): 1}


def test_a_remote_request_takes_the_time_of_the_formula():
    result = played([TraceRequest(1.0, 3000, 11)], WorkerCounts(1, 1))
    step = STEP.one(tokens=2048, attention=2048 * 1024) + STEP.one(
        tokens=952, attention=952 * (2048 + 476)
    )
    ttft_s = 0.003 + step + TIMING.frontend_s
    assert result.records.ttft_s[0] == pytest.approx(ttft_s)
    # The last chunk's bytes are sent after it; then the last prompt token and ten more.
    last_s = 2048 * 1000 / 1e9 + 0.002
    decode_s = sum(STEP.one(streams=1, kv=2999 + i) for i in range(11))
    assert result.records.total_s[0] == pytest.approx(ttft_s + last_s + decode_s)
    assert result.graph.tally.decisions == {("remote", "long"): 1}
    assert result.graph.tally.gaps.weight == 10


def test_a_slow_network_is_waited_for():
    slow = TransferTiming(handover_s=0.0, commit_s=0.0, bytes_per_token=1000, bytes_per_s=1e6)
    options = replace(OPTIONS, first_token_from_prefill=False)
    timing = replace_timing(transfer=slow)
    result = played(
        [TraceRequest(0.0, 3000, 1), TraceRequest(0.01, 3000, 1)],
        WorkerCounts(2, 1),
        options,
        timing,
    )
    # Both write into the one decode worker: three seconds each.
    assert result.records.ttft_s[0] == pytest.approx(3.0, abs=0.05)
    assert result.records.ttft_s[1] == pytest.approx(6.0, abs=0.06)


def replace_timing(**changes: object) -> Timing:
    fields = {name: getattr(TIMING, name) for name in Timing.__struct_fields__}
    return Timing(**{**fields, **changes})


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_slot_waits_as_long_as_the_formula_of_m_d_1(load: float):
    timing = replace_timing(
        engine=EngineLimits(kv_tokens=10**6, max_num_seqs=1, max_num_batched_tokens=4096),
        frontend_s=0.0,
    )
    service_s = prefill_s(timing, 3000)
    requests = constant(load / service_s, 20_000 * service_s, sigma=0.0, prompt_tokens=3000)
    requests = [replace(one, output_tokens=1) for one in requests]
    options = replace(OPTIONS, worker_limits=Limits())
    result = played(requests, WorkerCounts(0, 1), options, timing)
    waited_s = sum(result.records.ttft_s) / len(requests) - service_s
    # Pollaczek-Khinchine with equal services.
    assert waited_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.12)


def test_the_load_that_workers_can_carry_is_carried_and_no_more():
    service_s = prefill_s(TIMING, 2000)
    for load, kept in ((0.7, True), (1.5, False)):
        requests = constant(2 * load / service_s, 60.0, sigma=0.0, output_tokens=1)
        options = replace(
            OPTIONS,
            thresholds=DecisionThresholds(max_prefill_queue_size=10**6),
            max_jobs=10**6,
            steal_back=False,
        )
        result = played(requests, WorkerCounts(2, 4), options)
        late = [one for one in result.records.ttft_s if one > 5.0]
        assert (not late) == kept


def test_prompts_are_taken_back_when_the_queue_is_too_long_for_the_workers():
    """Decode workers with time to spare carry what the prefill workers cannot."""
    requests = constant(3 / prefill_s(TIMING, 2000), 60.0, sigma=0.0, output_tokens=1)
    thresholds = DecisionThresholds(max_prefill_queue_size=10**6)
    options = replace(OPTIONS, thresholds=thresholds, max_jobs=10**6, worker_limits=Limits())
    results = [
        played(requests, WorkerCounts(2, 4), replace(options, steal_back=steals))
        for steals in (False, True)
    ]
    kept, taken = (one.graph.tally.outcomes["taken_back"] for one in results)
    assert kept == 0 and taken > 0.1 * len(requests)
    waits = [percentiles(one.records.ttft_s)["p99"] for one in results]
    assert waits[0] is not None and waits[1] is not None and waits[1] < 0.5 * waits[0]
    for one in results:
        assert one.records.completed == len(requests)
        assert one.graph.backlog.queue.jobs == one.graph.backlog.queue.tokens == 0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    counts=st.sampled_from(["0P1D", "1P1D", "2P3D", "3P1D"]),
    router=st.sampled_from(["round-robin", "random", "kv"]),
    rate=st.floats(0.5, 60),
    kv=st.integers(9000, 60_000),
    timeout_s=st.sampled_from([0.05, 0.5, 30.0]),
)
def test_every_request_ends_once_and_nothing_is_left(
    seed: int, counts: str, router, rate: float, kv: int, timeout_s: float
):
    shape = Shape(
        kind="burst",
        duration_s=20,
        rate=rate / 4,
        peak=rate,
        prompt_tokens=900,
        output_tokens=60,
        shared_tokens=256,
        groups=3,
        sigma=0.8,
    )
    try:
        requests = generate(shape, block_tokens=64, seed=seed).requests
    except ConfigError:  # by chance none arrives
        reject()
    options = replace(
        OPTIONS,
        router=router,
        seed=seed,
        worker_limits=Limits(in_flight=30, prompt_tokens=20_000),
        frontend_limits=Limits(in_flight=80),
        thresholds=DecisionThresholds(remote_prefill_timeout_s=timeout_s),
    )
    limits = EngineLimits(kv_tokens=kv, max_num_seqs=16, max_num_batched_tokens=512)
    result = played(requests, parse_counts(counts), options, replace_timing(engine=limits))
    records, graph = result.records, result.graph
    assert records.completed + records.refused == len(requests) == records.arrived
    assert sum(not math.isnan(one) for one in records.total_s) == records.completed
    assert all(
        first <= total
        for first, total in zip(records.ttft_s, records.total_s, strict=True)
        if not math.isnan(total)
    )
    assert graph.in_flight == 0
    # A prompt that is preempted before its first token is decided again.
    again = sum(worker.engine.preemptions for worker in graph.decode.ready)
    decided = sum(graph.tally.decisions.values())
    assert records.completed <= decided <= records.completed + again
    for worker in graph.decode.ready:
        assert worker.in_flight == worker.running == worker.engine.pool.used == 0
        assert worker.parked_tokens == 0
    assert graph.backlog.queue.jobs == 0 or graph.backlog.queue.tokens == 0


def test_the_same_seed_is_the_same_report():
    requests = constant(8.0, 30.0, shared_tokens=256)
    for router in ("random", "kv"):
        options = replace(OPTIONS, router=router)
        first, again = (
            summary(played(requests, WorkerCounts(2, 2), options), Slo()) for _ in range(2)
        )
        assert first == again
        other = summary(played(requests, WorkerCounts(2, 2), replace(options, seed=9)), Slo())
        assert other["requests"] == first["requests"]
    assert first["placements"]["prefix"] > 0


def test_kv_routing_finds_prefixes_among_many_workers():
    requests = constant(20.0, 60.0, shared_tokens=1280, prompt_tokens=2000, sigma=0.1)
    by_turns = played(requests, WorkerCounts(4, 40))
    by_prefix = played(requests, WorkerCounts(4, 40), replace(OPTIONS, router="kv"))
    share = [
        one.graph.tally.cached_tokens / one.graph.tally.prompt_tokens
        for one in (by_turns, by_prefix)
    ]
    assert share[1] > share[0] + 0.1


def test_a_full_queue_makes_prompts_local():
    requests = [TraceRequest(i * 1e-4, 3000, 2) for i in range(40)]
    options = replace(OPTIONS, thresholds=DecisionThresholds(max_prefill_queue_size=5))
    decisions = played(requests, WorkerCounts(1, 4), options).graph.tally.decisions
    assert decisions["remote", "long"] >= 5
    assert decisions["local", "queue_full"] > 10


def test_a_prompt_that_fits_no_worker_is_refused():
    result = played([TraceRequest(0.0, 70_000, 5), TraceRequest(0.1, 100, 5)], WorkerCounts(1, 1))
    assert (result.records.refused, result.records.completed) == (1, 1)


class Recorder:
    """A scaler that asks for numbers by time, and keeps what it saw."""

    name, tick_s = "recorder", 10.0

    def __init__(self, wanted: dict[float, WorkerCounts]):
        self.wanted, self.seen = wanted, list[tuple[float, ScalerInputs]]()

    def tick(self, seen: ScalerInputs, now: float) -> ScalerProposal:
        self.seen.append((now, seen))
        latest = max(at for at in self.wanted if at <= now)
        return ScalerProposal(self.wanted[latest], "as told")


def test_starts_take_their_time_and_drains_finish_their_requests():
    requests = constant(6.0, 200.0)
    scaler = Recorder(
        {0.0: WorkerCounts(1, 1), 40.0: WorkerCounts(3, 2), 120.0: WorkerCounts(1, 1)}
    )
    run = Run(requests, TIMING, OPTIONS, scaler, WorkerCounts(1, 1), PLENTY, start_s=25.0)
    result = run.run()
    seen = dict(scaler.seen)
    assert (seen[50.0].prefill.ready, seen[50.0].prefill.starting_ages_s) == (1, (10.0, 10.0))
    assert (seen[70.0].prefill.ready, seen[70.0].decode.ready) == (3, 2)
    assert seen[70.0].decode.youngest_s == pytest.approx(5.0)
    assert seen[150.0].prefill.count == seen[150.0].decode.count == 1
    assert result.records.completed == len(requests)
    assert [(one.at_s, str(one.wanted)) for one in result.changes] == [(40, "3P2D"), (120, "1P1D")]
    # One of each all the time; the others from their orders until they have drained.
    extra_s = result.graph.prefill.device_seconds() - result.ended_s
    assert 2 * 80 <= extra_s < 2 * 90
    assert sum(one.requests for one in seen.values()) <= len(requests)
    assert seen[100.0].asked_tokens > 0 and seen[100.0].itl_s is not None


def test_a_start_that_is_no_longer_wanted_is_cancelled():
    scaler = Recorder({0.0: WorkerCounts(1, 3), 20.0: WorkerCounts(1, 1)})
    run = Run(
        constant(1.0, 100.0), TIMING, OPTIONS, scaler, WorkerCounts(1, 1), PLENTY, start_s=60.0
    )
    result = run.run()
    extra_s = result.graph.decode.device_seconds() - result.ended_s
    assert extra_s == pytest.approx(2 * 20.0)
    assert max(one.decode for one in result.samples) == 1


def test_the_oracle_serves_a_step_with_less_than_the_numbers_for_its_peak():
    shape = Shape(kind="step", duration_s=300, rate=4.0, peak=16.0)
    requests = generate(shape, block_tokens=64, seed=2).requests
    setting = Setting(
        requests=requests,
        timing=TIMING,
        options=OPTIONS,
        counts=WorkerCounts(4, 4),
        most_workers=16,
        start_s=30.0,
    )
    runs = {
        name: summary(run_variant(variant(name, setting), setting), Slo())
        for name in ("static:4P4D", "local-only", "oracle")
    }
    assert runs["oracle"]["attainment"]["both"] > 0.95
    assert runs["oracle"]["gpu_s"]["total"] < 0.8 * runs["static:4P4D"]["gpu_s"]["total"]
    assert runs["local-only"]["decisions"].keys() == {
        "local short",
        "local no_prefill_worker",
    }


@pytest.mark.parametrize(
    "name",
    [
        "static:2D",
        "static:1P0D",
        "oracle:2",
        "script:x=1P1D",
        "planner?",
        "script:5",
        "oracle:0.8",
        "planner:tick=5",
        "planner:tick-s=x",
        "planner:down-share=0.9",
    ],
)
def test_unknown_variants_are_refused(name: str):
    setting = Setting(
        requests=[TraceRequest(0.0, 1, 1)],
        timing=TIMING,
        options=OPTIONS,
        counts=WorkerCounts(1, 1),
        most_workers=2,
        start_s=1.0,
    )
    with pytest.raises(ConfigError, match=r"accepted|must be below"):
        variant(name, setting)


def test_percentiles_are_nearest_ranks():
    values = [math.nan, *(float(i) for i in range(1, 101))]
    assert percentiles(values) == {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "mean": 50.5}


def test_equal_blocks_are_equal_prefixes():
    one = with_blocks(0.0, 200, 1, [5, 6, 7, 8], 64)
    other = with_blocks(0.0, 130, 1, [5, 6, 9], 64)
    assert len(one.hashes) == 3 and one.hashes[:2] == other.hashes

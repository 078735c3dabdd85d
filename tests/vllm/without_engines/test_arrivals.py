"""A decode engine's scheduler: what waits for KV does not hold up others."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from benchmarks.followers import BLOCK, Steps
from dynamo_lite.disagg.attempts.ledger import Ended, Outcome, Release
from dynamo_lite.disagg.messages import DecodeStep, PrefillStep
from dynamo_lite.vllm.engine import arrivals, connector
from dynamo_lite.vllm.engine.arrivals import (
    ArrivalScheduler,
    AsyncArrivalScheduler,
    wait_for_arrival,
    waits_in_steps,
)
from dynamo_lite.vllm.engine.connector_types import StepMetadata
from tests.builders import DECODE_ROLE, PREFILL_ROLE, engine_config

DECODE, PREFILL = engine_config(DECODE_ROLE), engine_config(PREFILL_ROLE)


@pytest.mark.parametrize(("arrives_at", "waited_s"), [(1, 0.0), (3, 0.0004), (1000, 0.001)])
def test_a_wait_ends_with_the_look_that_finds_kv(arrives_at: int, waited_s: float):
    """New requests and aborts are looked at between two steps only."""
    looks, slept = iter(range(1, 2000)), list[float]()
    rank: Any = SimpleNamespace(poll=lambda: next(looks) >= arrives_at)
    wait_for_arrival(rank, sleep=slept.append)
    assert sum(slept) == pytest.approx(waited_s)


@pytest.mark.parametrize(
    ("step", "sleeps"),
    [(DecodeStep(wait=True), False), (DecodeStep(poll=True), True), (PrefillStep(), True)],
)
def test_vllm_does_not_sleep_after_a_step_that_has_waited(monkeypatch, step: Any, sleeps: bool):
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: {0: "outputs"})
    output: Any = SimpleNamespace(
        total_num_scheduled_tokens=0, kv_connector_metadata=StepMetadata(step)
    )
    scheduler = ArrivalScheduler.__new__(ArrivalScheduler)
    assert scheduler.update_from_output(output, None) == {0: "outputs"}  # type: ignore[arg-type]
    assert (output.total_num_scheduled_tokens == 0) is sleeps


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),
        ({"scheduler": AsyncArrivalScheduler}, False),
        ({"scheduler": Scheduler}, False),
        ({"max_concurrent_batches": 2}, False),
        ({"speculative_config": object()}, False),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, False),
    ],
)
def test_steps_wait_only_where_vllm_does_not_sleep_after_them(changes: Any, waits: bool):
    scheduler = changes.pop("scheduler", ArrivalScheduler)
    config: Any = {
        "max_concurrent_batches": 1,
        "scheduler_config": SimpleNamespace(get_scheduler_cls=lambda: scheduler),
        "parallel_config": SimpleNamespace(data_parallel_size=1),
        "speculative_config": None,
    }
    assert waits_in_steps(SimpleNamespace(**{**config, **changes})) is waits  # type: ignore[arg-type]


@pytest.mark.parametrize("scheduler", [None, f"{arrivals.__name__}.AsyncArrivalScheduler"])
def test_followers_cost_a_step_nothing_until_their_leaders_kv_is_here(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str | None
):
    monkeypatch.setattr(connector, "die_with_parent", lambda sig: None)
    steps = Steps(model, tmp_path, 100, scheduler)
    engine, prefix = steps.engine, [1] * 8 * BLOCK
    steps.cache(prefix)
    steps.add("stream", [2] * 20)
    for name in ("leader", "a", "b", "c"):
        steps.add(name, [*prefix, *[3] * 20 * BLOCK, ord(name[0])])
    looked_up = Counter[str]()
    look_up = engine.kv_cache_manager.get_computed_blocks
    monkeypatch.setattr(
        engine.kv_cache_manager,
        "get_computed_blocks",
        lambda request, *more: (looked_up.update([request.request_id]), look_up(request, *more))[1],
    )
    assert [steps.step() for _ in range(5)] == [["stream"]] * 5
    assert set(looked_up.values()) == {1} and len(looked_up) == 5
    assert engine.get_request_counts() == (1, 4)
    engine.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    steps.step(received=["leader"])
    assert steps.step() == ["stream", "leader", "a", "c"]
    cached = steps.outputs[0].scheduler_stats.prefix_cache_stats
    assert (cached.requests, cached.hits) == (2, 2 * 28 * BLOCK)
    assert engine.get_request_counts() == (4, 0) and looked_up["b"] == 1


def losing(steps: Steps, workers: int, **blocks: int) -> Any:
    """Prompts of so many blocks have been sent to the first of these workers. The decode half."""
    steps.cache([1] * BLOCK)
    decode: Any = steps.engine.connector._decode  # type: ignore[union-attr]
    responsive = tuple(SimpleNamespace(lease_id=number + 1) for number in range(workers))
    decode._net.workers.usable = decode._net.workers.responsive = responsive
    for token, (name, count) in enumerate(blocks.items(), 10):
        steps.add(name, [token] * count * BLOCK)
    steps.step()
    for name in blocks:
        decode.prefills.by_request[name].writer = 1
    return decode


def test_a_lost_prompt_that_is_asked_for_again_needs_its_blocks_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connector, "die_with_parent", lambda sig: None)
    steps = Steps(model, tmp_path, 130)
    decode = losing(steps, workers=2, long=60, ready=20)
    attempt = decode.prefills.by_request["long"].attempt
    decode._attempts.inbox += [Ended("long", attempt, Outcome.WRITER_FAILED), Release(attempt)]
    steps.step()
    steps.step(lost=["long"])
    steps.add("short", [3] * 20)
    assert steps.step() == ["short"]
    assert steps.engine.requests["long"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert decode.prefills.by_request["long"].attempt != attempt


def test_prompts_whose_kv_is_here_do_not_wait_for_the_blocks_of_a_lost_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whose blocks are not free while its writer may still write."""
    monkeypatch.setattr(connector, "die_with_parent", lambda sig: None)
    steps = Steps(model, tmp_path, 110)
    decode = losing(steps, workers=1, long=60, ready=20)
    attempt = decode.prefills.by_request["long"].attempt
    decode._attempts.inbox.append(Ended("long", attempt, Outcome.WRITER_LOST))
    steps.step()
    steps.step(lost=["long"], received=["ready"])
    assert steps.step() == ["ready"]
    assert steps.engine.requests["long"].status is RequestStatus.WAITING


def test_prompts_that_are_lost_together_keep_their_order(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connector, "die_with_parent", lambda sig: None)
    steps, names = Steps(model, tmp_path, 200), ["a", "b", "c"]
    decode = losing(steps, workers=1, a=20, b=20, c=20)
    decode._net.workers.usable = decode._net.workers.responsive = ()
    for name in names:
        attempt = decode.prefills.by_request[name].attempt
        decode._attempts.inbox += [Ended(name, attempt, Outcome.WRITER_FAILED), Release(attempt)]
    steps.step()
    steps.step(lost=names)
    assert steps.step() == names

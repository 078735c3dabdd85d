"""A decode engine's steps that compute nothing: how they wait for KV, and what follows them."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from dynamo_lite.disagg.engine_config import (
    DecodeEngineConfig,
    EngineConfig,
    PrefillEngineConfig,
)
from dynamo_lite.disagg.messages import DecodeStep, PrefillStep
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.vllm.engine import arrivals
from dynamo_lite.vllm.engine.arrivals import (
    ArrivalScheduler,
    arrival_wait_s,
    schedule_arrivals_at_once,
    wait_for_arrival,
    waits_in_steps,
)
from dynamo_lite.vllm.engine.connector_types import StepMetadata


def engine_config(role: DecodeEngineConfig | PrefillEngineConfig) -> EngineConfig:
    return EngineConfig(
        namespace="t",
        engine_id="e1",
        lease_id=1,
        lease_ttl_s=5.0,
        nats_url="",
        etcd_url="",
        role=role,
    )


DECODE = engine_config(
    DecodeEngineConfig(
        options=DisaggOptions(), prefill_component="PrefillWorker", queue=QueueConfig()
    )
)
PREFILL = engine_config(
    PrefillEngineConfig(fence_path="", min_prefix_read_length=128, queue=QueueConfig())
)


class Rank:
    """A rank with KV that arrives at the given look, counted from 1."""

    def __init__(self, arrives_at: int):
        self.looks, self.arrives_at, self.now = 0, arrives_at, 0.0

    def poll(self) -> bool:
        self.looks += 1
        return self.looks >= self.arrives_at

    def sleep(self, for_s: float) -> None:
        self.now += for_s

    def wait(self) -> None:
        wait_for_arrival(self, 0.001, now=lambda: self.now, sleep=self.sleep)  # type: ignore[arg-type]


def test_kv_that_is_there_is_not_waited_for():
    rank = Rank(1)
    rank.wait()
    assert (rank.looks, rank.now) == (1, 0.0)


def test_kv_that_comes_during_the_wait_ends_it():
    rank = Rank(3)
    rank.wait()
    assert rank.now == pytest.approx(0.0004)


def test_the_wait_ends():
    """New requests and aborts are looked at between two steps only."""
    rank = Rank(1000)
    rank.wait()
    assert 0.001 <= rank.now <= 0.0012


@pytest.mark.parametrize(
    ("away_s", "wait_s"),
    [(None, 0.0), (0.0, 0.001), (0.1, 0.001), (0.2, 0.002), (0.5, 0.005), (60.0, 0.005)],
)
def test_a_wait_is_a_small_part_of_the_time_away(away_s: float | None, wait_s: float):
    assert arrival_wait_s(away_s) == pytest.approx(wait_s)


@pytest.mark.parametrize(
    ("step", "sleeps"),
    [(DecodeStep(wait_s=0.001), False), (DecodeStep(poll=True), True), (PrefillStep(), True)],
)
def test_vllm_does_not_sleep_after_a_step_that_has_waited(monkeypatch, step: Any, sleeps: bool):
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: {0: "outputs"})
    output: Any = SimpleNamespace(
        total_num_scheduled_tokens=0, kv_connector_metadata=StepMetadata(step)
    )
    scheduler = ArrivalScheduler.__new__(ArrivalScheduler)
    assert scheduler.update_from_output(output, None) == {0: "outputs"}  # type: ignore[arg-type]
    assert (output.total_num_scheduled_tokens == 0) is sleeps


def config(**other: Any) -> Any:
    scheduler = SimpleNamespace(async_scheduling=False, scheduler_cls=None)
    plain = {
        "max_concurrent_batches": 1,
        "scheduler_config": scheduler,
        "parallel_config": SimpleNamespace(data_parallel_size=1),
        "speculative_config": None,
    }
    return SimpleNamespace(**{**plain, **other})


def test_a_plain_decode_engine_gets_the_scheduler():
    made = config()
    schedule_arrivals_at_once(made, DECODE)
    assert made.scheduler_config.scheduler_cls == f"{arrivals.__name__}.ArrivalScheduler"


@pytest.mark.parametrize(
    "other",
    [
        {"max_concurrent_batches": 2},
        {"parallel_config": SimpleNamespace(data_parallel_size=2)},
        {"speculative_config": object()},
        {"scheduler_config": SimpleNamespace(async_scheduling=True, scheduler_cls=None)},
        {"scheduler_config": SimpleNamespace(async_scheduling=False, scheduler_cls="mine.Own")},
    ],
)
def test_other_engines_keep_their_scheduler(other: dict[str, Any]):
    made = config(**other)
    before = made.scheduler_config.scheduler_cls
    schedule_arrivals_at_once(made, DECODE)
    assert made.scheduler_config.scheduler_cls == before


@pytest.mark.parametrize("other", [PREFILL, None])
def test_only_decode_engines_wait(other: EngineConfig | None):
    made = config()
    schedule_arrivals_at_once(made, other)
    assert made.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("cls", [Scheduler, ArrivalScheduler])
def test_steps_wait_only_where_vllm_does_not_sleep_after_them(cls: type):
    made: Any = SimpleNamespace(scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: cls))
    assert waits_in_steps(made) is (cls is ArrivalScheduler)

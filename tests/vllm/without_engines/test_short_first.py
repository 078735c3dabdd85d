"""Who sits out a step of a prefill engine."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from dynamo_lite.disagg.transfer_params import PrefillLength, pack
from dynamo_lite.vllm.engine.short_first import ShortFirst


def request(
    name: str,
    tokens: int,
    *,
    held_there: int = 0,
    priority: int = 0,
    wanted: int = 0,
    adapter: int = 0,
) -> Any:
    """wanted: tokens whose KV is wanted, if there are fewer. adapter: its number; 0 is none."""
    return SimpleNamespace(
        lora_request=SimpleNamespace(lora_int_id=adapter) if adapter else None,
        request_id=name,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        priority=priority,
        status=RequestStatus.WAITING,
        kv_transfer_params=pack(
            PrefillLength(num_computed_tokens=held_there, num_tokens=wanted or tokens)
        ),
    )


class Engine(ShortFirst):
    """Its steps compute the running requests in order, 10 tokens each, and admit one waiting
    request, unless the step is full."""

    def __init__(self, running: list[Any], waiting: list[Any]):
        self.running, self.waiting = running, deque(waiting)  # type: ignore[assignment]
        self._short_length, self._skipped, self._no_skips = 100, 0, 0
        self.kv_holding_waiting = deque()  # type: ignore[assignment]
        self.lora_config = SimpleNamespace(max_loras=1)  # type: ignore[assignment]
        self.finished_recving_kv_req_ids = set()
        self.max_num_running_reqs = self.max_num_active_reqs = 8
        self.full = False

    def steps(self, count: int) -> list[str]:
        return [self.schedule().name for _ in range(count)]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def vllm_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        computing = [r for r in self.running if r.num_computed_tokens < r.num_prompt_tokens]
        full = self.full or len(self.running) >= self.max_num_active_reqs
        assert len(self.running) <= self.max_num_running_reqs
        if not computing and full:
            return SimpleNamespace(name="nobody", total_num_scheduled_tokens=0)
        if not computing:
            ready = next(q for q in (self.kv_holding_waiting, self.waiting) if q)
            computing = [ready.popleft()]
            self.running += computing
        first = computing[0]
        first.num_computed_tokens += 10
        return SimpleNamespace(name=first.request_id, total_num_scheduled_tokens=10)

    monkeypatch.setattr(Scheduler, "schedule", schedule)


def test_a_short_prompt_passes_a_long_one_that_keeps_its_place():
    engine = Engine([request("long", 1000)], [request("short", 30)])
    assert engine.steps(4) == ["short", "short", "short", "long"]
    assert [r.request_id for r in engine.running] == ["long", "short"]


def test_no_more_adapters_run_at_once_than_vllm_allows():
    """It does not count those of prompts that sit out, and dies when they come back."""
    engine = Engine([request("long", 1000, adapter=1)], [request("short", 30, adapter=2)])
    assert engine.steps(4) == ["long"] * 4
    engine = Engine([request("long", 1000, adapter=1)], [request("short", 30, adapter=1)])
    assert engine.steps(4) == ["short", "short", "short", "long"]


def test_long_prompts_among_themselves_go_on_as_ever():
    engine = Engine([request("first", 1000), request("second", 1000)], [])
    assert engine.steps(3) == ["first"] * 3
    waiting = request("short", 30)
    waiting.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.waiting.append(waiting)
    assert engine.steps(1) == ["first"]


def test_what_is_short_is_what_there_is_to_compute_and_priority_counts():
    engine = Engine([request("long", 1000)], [request("cached there", 1000, held_there=990)])
    assert engine.steps(1) == ["cached there"]
    # One token more is computed, to sample from it.
    engine = Engine([request("long", 1000)], [request("edge", 101, wanted=100)])
    assert engine.steps(1) == ["edge"]
    engine = Engine([request("long", 1000)], [request("beyond", 101)])
    assert engine.steps(1) == ["long"]
    engine = Engine([request("long", 1000)], [request("urgent", 1000, priority=-1)])
    assert engine.steps(1) == ["urgent"]
    engine = Engine([request("urgent", 1000, priority=-1)], [request("later", 10, priority=1)])
    assert engine.steps(1) == ["urgent"]


def test_a_long_prompt_does_not_sit_out_for_ever():
    engine = Engine([request("long", 1000)], [request(f"s{i}", 100) for i in range(20)])
    taken = engine.steps(66)
    assert [i for i, name in enumerate(taken) if name == "long"] == [32, 65]


def test_no_prompt_sits_out_for_those_that_find_no_room():
    engine = Engine([request("long", 1000)], [request("short", 10)])
    engine.full = True
    rest = ["long"] * 8
    assert engine.steps(len(rest) + 2) == ["nobody", *rest, "nobody"]
    engine.full = False
    assert engine.steps(len(rest) + 2) == [*rest, "short", "long"]


def test_a_full_batch_is_full_for_short_prompts_too():
    engine = Engine([request("first", 1000), request("second", 1000)], [request("short", 30)])
    engine.max_num_running_reqs = engine.max_num_active_reqs = 2
    assert engine.steps(3) == ["first"] * 3
    assert len(engine.running) == 2 and engine.max_num_running_reqs == 2


def test_who_has_read_its_prefix_passes():
    reading = request("reading", 1000, held_there=990)
    reading.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine = Engine([request("long", 1000)], [])
    engine.kv_holding_waiting.append(reading)
    assert engine.steps(1) == ["long"]
    engine.finished_recving_kv_req_ids.add("reading")
    assert engine.steps(1) == ["reading"]

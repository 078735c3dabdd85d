"""What the planner learns of requests: their rate, what they need, and how fast workers are."""

import random
from dataclasses import replace

import pytest

from dynamo_lite.planner.policy.inputs import Role, RoleSeen, Seen
from dynamo_lite.planner.policy.planner import PlannerMemory, plan
from dynamo_lite.planner.policy.work import Work
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import RoleCounts
from tests.unit.planner_world import D, P, World, decode_load, prefill_load

LIMITS = PlannerOptions(budget_devices=64, prefill_max=32, decode_max=32)


def arrivals(rates: list[float], *, seed: int | None = None) -> list[Work]:
    """After each tick of 5 s with that many requests per second, over windows of 10 s."""
    rng = random.Random(seed)
    made, work, before = [], Work(), None
    for tick, rate in enumerate(rates):
        here = rate if seed is None else sum(rng.random() < rate / 1000 for _ in range(5000)) / 5
        work = work.arrived(here if before is None else (here + before) / 2, 0.0, 5.0 * tick)
        before = here
        made.append(work)
    return made


def test_a_jump_of_the_arrivals_is_believed_in_the_second_tick():
    works = arrivals([2.0] * 60 + [8.0] * 4)
    assert works[59].per_s == pytest.approx(2.0)
    assert [works[i].per_s for i in (60, 61, 62)] == pytest.approx([5.0, 8.0, 8.0], abs=0.3)
    # It is a jump and no ramp.
    assert works[63].growth(60.0) == 1.0


def test_a_queue_at_its_limit_hides_no_load():
    """Beyond the limit requests are rejected: what is admitted looks like the arrivals."""
    work = Work()
    for tick in range(60):
        work = work.arrived(2.0, 0.0, 5.0 * tick)
    for tick, queued in enumerate([30, 60, 90, 94, 94, 94, 94, 94], 60):
        work = work.arrived(2.0, queued, 5.0 * tick)
    assert work.per_s == pytest.approx(8.0, abs=0.3)
    # The new workers admit what waits. The rate is known again when the queue is short.
    for tick, queued in enumerate([54, 14, 0, 0, 0, 0], 68):
        work = work.arrived(10.0 if queued else 4.0, queued, 5.0 * tick)
    assert work.per_s == pytest.approx(4.0, abs=0.3)


def test_a_ramp_is_extrapolated():
    works = arrivals([4.0 + 0.05 * tick for tick in range(100)])
    now, in_a_minute = 4.0 + 0.05 * 99, 4.0 + 0.05 * (99 + 12)
    # Less than the whole rise counts: a part of it could be chance.
    assert now + 0.1 < works[-1].per_s * works[-1].growth(60.0) < in_a_minute  # pyright: ignore


@pytest.mark.parametrize("rate", [1.0, 4.0, 20.0])
def test_chance_is_no_load(rate: float):
    for seed in range(3):
        works = arrivals([rate] * 400, seed=seed)[50:]
        high = [one.per_s * one.growth(60.0) for one in works]  # pyright: ignore
        assert max(high) < rate + 3.5 * (rate / 10) ** 0.5
        inside = sum(abs((one.per_s or 0) - rate) <= one.doubt for one in works)
        assert inside > 0.8 * len(works)


def test_less_of_a_load_that_surely_rises_may_be_chance():
    works = arrivals([4.0] * 60 + [4.0 + 0.12 * tick for tick in range(60)])
    assert works[59].doubt == pytest.approx(0.8 * works[59].chance)
    assert works[-1].doubt == pytest.approx(0.4 * works[-1].chance)


def test_what_waits_for_memory_has_arrived():
    work = Work().arrived(2.0, 0.0, 0.0).arrived(2.0, 0.0, 5.0)
    assert work.arrived(2.0, 60.0, 10.0).per_s == pytest.approx(8.0)
    # While the queue is served more is admitted than arrives.
    full = Work().arrived(2.0, 60.0, 0.0)
    assert full.arrived(8.0, 0.0, 10.0).per_s == pytest.approx(2.0)


def test_the_most_tokens_of_a_worker_follow_from_its_pace_and_its_memory():
    work = Work()
    for requests in range(5, 25):
        # 10 ms and 1 ms for each request of a worker; each takes 2 % of the memory.
        token_s = 0.01 + 0.001 * requests
        work = work.ran(2 * requests / token_s, token_s, 2).held(0.02 * 2 * requests, 2 * requests)
    assert work.tokens_of_one(None) == pytest.approx(50 / 0.06, rel=0.01)
    assert work.tokens_of_one(20) == pytest.approx(20 / 0.03, rel=0.01)
    assert Work().tokens_of_one(None) is None


def known(decode: int, arriving: float, **changes: float | None) -> tuple[PlannerMemory, Seen]:
    """A memory that knows requests of 1,000 prefill and 100 output tokens, decode workers of 1,000
    tokens/s and prefill workers of 10,000; and what is seen of this many requests per second."""
    work = Work(pace=(0.01, 0.0008))
    for tick in range(30):
        work = work.arrived(arriving, 0.0, 5.0 * tick)
        work = work.served(1.0, tokens_per_s=100.0, prefill_per_s=1000.0).held(0.02, 1.0)
    load = replace(
        decode_load(0.1, 5),
        queued=0.0,
        admitted_per_s=arriving,
        tokens_per_s=100 * arriving,
        max_running=None,
    )
    seen = Seen(
        roles={
            P: RoleSeen(counts=RoleCounts(ready=1)),
            D: RoleSeen(counts=RoleCounts(ready=decode)),
        },
        prefill=prefill_load(1000 * arriving, rate=10_000),
        decode=replace(load, **changes),
    )
    return PlannerMemory(prefill_rate=10_000, work=work, at=145.0), seen


def needed(memory: PlannerMemory, seen: Seen, role: Role) -> int | None:
    return plan(memory, seen, LIMITS, 150.0)[1].roles[role].wanted


def test_needs_follow_the_rate_of_arrivals():
    # 1,000 tokens/s of one worker: 50 requests of 2 % each, 10 + 0.8 * 50 ms.
    for rate, workers in ((8.0, 1), (9.5, 2), (16.9, 2), (17.2, 3), (60.0, 8)):
        assert needed(*known(1, rate), D) == workers
    # Two prefill workers for 6.2 tenths of one: a single one would let prompts wait by chance.
    for rate, workers in ((3.0, 1), (7.0, 2), (16.0, 3), (64.0, 8)):
        assert needed(*known(1, rate), P) == workers


def test_what_could_be_chance_adds_no_worker_and_removes_none():
    # 8.5 requests/s are 0.85 of a decode worker; 9.0 may be 8.3 and chance.
    assert needed(*known(1, 9.0), D) == 1
    assert needed(*known(2, 9.0), D) == 2


def test_requests_that_wait_are_served_within_a_start():
    # 8 requests/s and 100 waiting ones in 20 s.
    memory, seen = known(1, 8.0)
    seen = replace(seen, decode=replace(seen.decode, waiting=100.0, queued=100.0))
    # They have arrived in the last ten seconds, too: 10 more per second.
    assert needed(memory, seen, D) == 3


def test_the_kv_of_a_backlog_that_drains_adds_no_worker():
    memory, seen = known(4, 20.0, kv_used=3.9, running=195.0)
    assert needed(memory, seen, D) == 3
    memory, seen = known(4, 20.0, kv_used=3.9, running=195.0, queued=None)
    assert needed(memory, seen, D) == 5


def test_without_the_rates_the_stock_tells():
    for missing in ("admitted_per_s", "queued"):
        memory, seen = known(1, 60.0, **{missing: None})
        assert needed(memory, seen, D) == 1


def test_a_prefill_worker_with_little_to_do_is_not_slower():
    w = World(LIMITS)
    w.decode = decode_load(0.1, 5)
    w.prefill = prefill_load(500, rate=1000)
    w.run(20)
    w.prefill = prefill_load(500, rate=400)
    w.run(60)
    assert w.memory.prefill_rate == pytest.approx(1000, rel=0.05)
    w.prefill = prefill_load(500, rate=400, backlog=5000)
    w.run(300)
    assert w.memory.prefill_rate == pytest.approx(400, rel=0.05)

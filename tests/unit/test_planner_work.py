"""What the planner learns of requests: their rate, what they need, and how fast workers are."""

from dataclasses import replace

import pytest

from dynamo_lite.planner.policy.inputs import Role, RoleSeen, Seen
from dynamo_lite.planner.policy.planner import PlannerMemory, plan
from dynamo_lite.planner.policy.work import Tick, Work
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import RoleCounts
from tests.unit.planner_world import D, P, World, decode_load, prefill_load

LIMITS = PlannerOptions(budget_devices=64, prefill_max=32, decode_max=32)


def arrived(work: Work, admitted: float, queued: float, at: float) -> Work:
    return work.add(Tick(at=at, admitted=admitted, queued=queued))


def rated(rate: float) -> float:
    """What counts of a measured rate."""
    return rate - 0.4 * (rate / 10) ** 0.5


def test_a_jump_of_the_arrivals_counts_as_soon_as_it_is_measured():
    work = Work()
    for tick, rate in enumerate([2.0] * 60 + [5.0, 8.0, 8.0]):
        work = arrived(work, rate, 0.0, 5.0 * tick)
    assert work.per_s == pytest.approx(rated(8.0))
    assert work.doubt == pytest.approx((rated(8.0) / 10) ** 0.5 * 0.7)


def test_a_queue_at_its_limit_hides_no_load():
    """Beyond the limit requests are rejected: what is admitted looks like the arrivals."""
    work = Work()
    for tick in range(60):
        work = arrived(work, 2.0, 0.0, 5.0 * tick)
    for tick, queued in enumerate([30, 60, 90, 94, 94, 94, 94, 94], 60):
        work = arrived(work, 2.0, queued, 5.0 * tick)
    assert work.per_s == pytest.approx(rated(8.0))
    # The new workers admit what waits. The rate is known again when the queue is short.
    for tick, queued in enumerate([54, 14, 0, 0, 0, 0], 68):
        work = arrived(work, 10.0 if queued else 4.0, queued, 5.0 * tick)
    assert work.per_s == pytest.approx(rated(4.0))


def test_what_waits_for_memory_has_arrived():
    work = arrived(arrived(Work(), 2.0, 0.0, 0.0), 2.0, 0.0, 5.0)
    assert arrived(work, 2.0, 60.0, 10.0).per_s == pytest.approx(rated(8.0))
    # While the queue is served more is admitted than arrives.
    full = arrived(Work(), 2.0, 60.0, 0.0)
    assert arrived(full, 8.0, 0.0, 10.0).per_s == pytest.approx(rated(2.0))


def test_a_pace_that_is_known_stays_while_the_load_does_not_change():
    """A line needs different loads, and must rise."""
    work = Work()
    for tick in range(10):
        work = work.add(Tick(at=tick, admitted=1, queued=0, batch=tick, token_s=0.01 + tick / 1000))
    pace = work.pace
    assert pace == pytest.approx((0.01, 0.001))
    for slope in (0.0, -0.001):
        later = replace(work, ticks=())
        for tick in range(10):
            batch = 50.0 if slope == 0 else tick
            made = Tick(at=tick, admitted=1, queued=0, batch=batch, token_s=0.1 + slope * batch)
            later = later.add(made)
        assert later.pace == pace


def test_the_most_tokens_of_a_worker_follow_from_its_pace_and_its_memory():
    work = Work()
    for requests in range(5, 25):
        # 10 ms and 1 ms for each request of a worker; each takes 2 % of the memory.
        tick = Tick(
            at=requests,
            admitted=1.0,
            queued=0.0,
            kv=0.02 * requests,
            running=requests,
            batch=requests,
            token_s=0.01 + 0.001 * requests,
        )
        work = work.add(tick)
    assert work.tokens_of_one(None) == pytest.approx(50 / 0.06, rel=0.01)
    assert work.tokens_of_one(20) == pytest.approx(20 / 0.03, rel=0.01)
    assert Work().tokens_of_one(None) is None


def known(decode: int, arriving: float, **changes: float | None) -> tuple[PlannerMemory, Seen]:
    """A memory that knows requests of 1,000 prefill and 100 output tokens, decode workers of 1,000
    tokens/s and prefill workers of 10,000; and what is seen of this many requests per second."""
    work = Work(pace=(0.01, 0.0008))
    for number in range(30):
        tick = Tick(
            at=5.0 * number,
            admitted=arriving,
            queued=0.0,
            output=100.0 * arriving,
            prefill=1000.0 * arriving,
            kv=0.02,
            running=1.0,
        )
        work = work.add(tick)
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
    for rate, workers in ((8.0, 1), (9.7, 2), (16.9, 2), (17.6, 3), (61.0, 8)):
        assert needed(*known(1, rate), D) == workers
    # Two prefill workers for 6.2 tenths of one: a single one would let prompts wait by chance.
    for rate, workers in ((3.0, 1), (7.4, 2), (16.0, 3), (64.0, 8)):
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

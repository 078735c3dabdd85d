"""Loads for the planner: sums of what is reported, and nothing for what is not."""

from dataclasses import dataclass

import pytest

from dynamo_lite.policy.scaling.observed import Outstanding, TokenRates, decode_load

RATES = TokenRates(admitted_per_s=3.0, tokens_per_s=900.0, token_s=0.02, itl_s=0.019)
REMOTE = Outstanding(jobs=2, tokens=2000)


@dataclass(frozen=True)
class Report:
    running: int | None = 10
    waiting: int | None = 4
    kv_usage: float | None = 0.5
    kv_tokens: int | None = 10_000


def value(datum: object) -> float | None:
    return getattr(datum, "value", None)


def test_all_workers_together():
    load = decode_load([Report(), Report()], REMOTE, RATES)
    assert (value(load.running), value(load.waiting)) == (20, 8)
    assert value(load.kv_used) == 1.0
    assert value(load.kv_parked) == pytest.approx(0.2)
    # Two of those that wait have their blocks; each of the others needs what a running one has.
    assert value(load.queued) == 6
    assert value(load.kv_waiting) == pytest.approx(6 * 0.05)
    assert (value(load.admitted_per_s), value(load.tokens_per_s)) == (3.0, 900.0)
    assert (value(load.token_s), value(load.itl_s)) == (0.02, 0.019)


def test_a_silent_worker_leaves_the_sums_incomplete():
    load = decode_load([Report(), Report(running=None)], REMOTE, RATES)
    assert value(load.running) == 10
    assert load.waiting is load.queued is load.kv_waiting is None
    assert decode_load([Report(running=None)], REMOTE, RATES).running is None


def test_it_may_not_be_known_who_waits_for_memory():
    load = decode_load([Report()], None, RATES)
    assert load.kv_parked is load.kv_waiting is load.queued is None
    assert value(load.waiting) == 4
    idle = decode_load([Report(waiting=0)], None, RATES)
    assert (value(idle.queued), value(idle.kv_waiting)) == (0, 0)

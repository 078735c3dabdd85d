"""Loads for the planner: sums of what is reported, and nothing for what is not."""

from dataclasses import dataclass

import pytest

from dynamo_lite.policy.decision.backlog import BacklogTotals
from dynamo_lite.policy.scaling.observed import DemandRates, TokenRates, decode_load
from dynamo_lite.protocol.backlog import Lane

RATES = TokenRates(admitted_per_s=3.0, tokens_per_s=900.0, token_s=0.02)
TOTALS = BacklogTotals(queued_jobs=2, queued_tokens={Lane.LONG: 2000})


@dataclass(frozen=True)
class Report:
    running: int | None = 10
    waiting: int | None = 4
    kv_usage: float | None = 0.5
    kv_tokens: int | None = 10_000
    max_running: int | None = 32


def test_all_workers_together():
    load = decode_load([Report(), Report()], TOTALS, RATES)
    assert (load.running, load.waiting) == (20, 8)
    assert load.kv_used == 1.0
    assert load.kv_parked == pytest.approx(0.2)
    # Two of those that wait have their blocks; each of the others needs what a running one has.
    assert load.queued == 6
    assert load.kv_waiting == pytest.approx(6 * 0.05)
    assert (load.admitted_per_s, load.tokens_per_s) == (3.0, 900.0)
    assert (load.token_s, load.max_running) == (0.02, 32)


def test_a_silent_worker_leaves_the_sums_incomplete():
    load = decode_load([Report(), Report(running=None)], TOTALS, RATES)
    assert load.running == 10
    assert load.waiting is load.queued is load.kv_waiting is None
    assert decode_load([Report(running=None)], TOTALS, RATES).running is None


def test_without_the_backlog_it_is_not_known_who_waits_for_memory():
    load = decode_load([Report()], None, RATES)
    assert load.kv_parked is load.kv_waiting is load.queued is None
    assert load.waiting == 4
    idle = decode_load([Report(waiting=0)], None, RATES)
    assert (idle.queued, idle.kv_waiting) == (0, 0)


def test_rates_of_demand_over_fifteen_seconds():
    demand = DemandRates()
    loads = [
        demand.load(
            BacklogTotals(asked_tokens=100 * t, overflow_tokens=10 * t), 500.0, t, complete=True
        )
        for t in (0, 5, 10, 15, 20)
    ]
    assert loads[0].asked_per_s is None
    assert (loads[-1].asked_per_s, loads[-1].refused_per_s) == (100, 10)
    part = demand.load(BacklogTotals(asked_tokens=2500), None, 25.0, complete=False)
    assert part.refused_per_s is part.rate is None
    demand.forget()
    assert demand.load(BacklogTotals(asked_tokens=9), 1.0, 30.0, complete=True).asked_per_s is None

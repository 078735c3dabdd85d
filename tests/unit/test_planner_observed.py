"""Loads for the planner: sums of what is reported, and nothing for what is not."""

from dataclasses import dataclass

import pytest

from dynamo_lite.planner.policy.observed import Outstanding, decode_load

REMOTE = Outstanding(jobs=2, tokens=2000)


@dataclass(frozen=True)
class Report:
    running: int | None = 10
    waiting: int | None = 4
    kv_usage: float | None = 0.5
    kv_tokens: int | None = 10_000
    max_running: int | None = 32


def test_all_workers_together():
    load = decode_load([Report(), Report()], REMOTE)
    assert (load.running, load.waiting) == (20, 8)
    assert load.kv_used == 1.0
    assert load.kv_parked == pytest.approx(0.2)
    # Two of those that wait have their blocks; each of the others needs what a running one has.
    assert load.queued == 6
    assert load.kv_waiting == pytest.approx(6 * 0.05)
    assert load.max_running == 32


def test_a_silent_worker_leaves_the_sums_incomplete():
    load = decode_load([Report(), Report(running=None)], REMOTE)
    assert load.running == 10
    assert load.waiting is load.queued is load.kv_waiting is None
    assert decode_load([Report(running=None)], REMOTE).running is None


def test_it_may_not_be_known_who_waits_for_memory():
    load = decode_load([Report()], None)
    assert load.kv_parked is load.kv_waiting is load.queued is None
    assert load.waiting == 4
    idle = decode_load([Report(waiting=0)], None)
    assert (idle.queued, idle.kv_waiting) == (0, 0)

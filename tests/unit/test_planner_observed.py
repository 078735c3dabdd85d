"""Loads for the planner: sums of what is reported, and nothing for what is not."""

import pytest

from dynamo_lite.planner.observation import decode_load
from dynamo_lite.runtime.overview.model import LiveProcess

REMOTE = 2


def report(**changes: int | None) -> LiveProcess:
    told = {"running": 10, "waiting": 4, "max_running": 32, **changes}
    return LiveProcess(component="", instance=0, lease="", state="ready", kv_usage=0.5, **told)


def test_all_workers_together():
    load = decode_load([report(), report()], REMOTE)
    assert (load.running, load.waiting) == (20, 8)
    assert load.kv_used == 1.0
    # Two of those that wait have their blocks; each of the others needs what a running one has.
    assert load.queued == 6
    assert load.kv_waiting == pytest.approx(6 * 0.05)
    assert load.max_running == 32


def test_a_silent_worker_leaves_the_sums_incomplete():
    load = decode_load([report(), report(running=None)], REMOTE)
    assert load.running == 10
    assert load.waiting is load.queued is load.kv_waiting is None
    assert decode_load([report(running=None)], REMOTE).running is None


def test_it_may_not_be_known_who_waits_for_memory():
    load = decode_load([report()], None)
    assert load.kv_waiting is load.queued is None
    assert load.waiting == 4
    idle = decode_load([report(waiting=0)], None)
    assert (idle.queued, idle.kv_waiting) == (0, 0)

"""The planner's rules one by one. `tests/simulation/planner_invariants.py` has its invariants."""

import itertools
import math
from dataclasses import replace

import pytest

from dynamo_lite.planner.policy.inputs import (
    DecodeLoad,
    PrefillLoad,
    RoleSeen,
    Seen,
)
from dynamo_lite.planner.policy.limits import contradictions, refusals
from dynamo_lite.planner.policy.planner import PlannerMemory, begun, plan
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import RoleCounts
from tests.unit.planner_world import D, P, Pool, World, decode_load, prefill_load

LIMITS = PlannerOptions(
    budget_devices=64,
    prefill_max=32,
    decode_max=32,
    down_window_s=300.0,
    start_s=20.0,
    start_timeout_s=40.0,
)
QUIET = prefill_load(0), decode_load(0)


def world(prefill: Pool | None = None, decode: Pool | None = None, **changed: float) -> World:
    made = World(replace(LIMITS, **changed), prefill, decode)
    made.prefill, made.decode = QUIET
    return made


def adds(proposal, role):
    return sum(a.by for a in proposal.actions if a.kind == "add" and a.role is role)


def removes(proposal, role):
    return [a for a in proposal.actions if a.kind == "remove" and a.role is role]


# More workers


def test_a_need_is_acted_on_in_the_second_tick():
    w = world()
    w.prefill = prefill_load(1500)
    first = w.tick()
    assert not first.actions
    assert first.roles[P].reason.endswith("needed once so far")
    assert first.roles[P].wanted == 2
    assert adds(w.tick(), P) == 1


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (prefill_load(1600), 2),
        (prefill_load(1601), 3),
        # What found no room in the queue is demand, too.
        (prefill_load(800, refused=900), 3),
        # A backlog is to be gone after the time of a start, 20 s here.
        (prefill_load(800, backlog=16_000), 2),
        (prefill_load(800, backlog=16_100), 3),
    ],
)
def test_prefill_workers_for_a_load(load, wanted):
    w = world()
    w.prefill = load
    assert w.tick().roles[P].wanted == wanted


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (decode_load(0.85), 1),
        (decode_load(0.86), 2),
        (decode_load(0.1, 171), 3),
        (decode_load(0.1, 100, waiting=71), 3),
        (replace(decode_load(0.5), kv_waiting=0.5), 2),
    ],
)
def test_decode_workers_for_a_load(load, wanted):
    w = world()
    w.decode = load
    assert w.tick().roles[D].wanted == wanted


def test_without_a_measured_rate_one_more_while_prompts_find_no_room():
    w = world()
    w.prefill = prefill_load(3000, rate=None)
    assert w.tick().roles[P].wanted is None
    w.prefill = prefill_load(3000, refused=100, rate=None)
    w.tick()
    assert adds(w.tick(), P) == 1


def test_below_the_minimum_a_worker_is_added_at_once():
    w = world(prefill=Pool(ready=0), prefill_min=2)
    w.prefill, w.decode = PrefillLoad(), DecodeLoad()
    assert adds(w.tick(), P) == 2


# Fewer workers


def test_fewer_after_the_whole_window_and_one_at_a_time():
    w = world(prefill=Pool(ready=3))
    taken = [w.now for proposal in w.run(400) if removes(proposal, P)]
    assert w.pools[P].count == 1
    first, second = (at for at, _, _ in w.orders)
    assert first - 1000 >= 300
    assert second - first >= w.pools[P].drain_s
    assert len(taken) == 2


def test_one_busy_moment_keeps_a_worker_for_a_whole_window():
    w = world(prefill=Pool(ready=2))
    w.run(290)
    w.prefill = prefill_load(1500)
    w.tick()
    busy_at = w.now
    w.prefill = prefill_load(0)
    w.run(400)
    assert [up for _, _, up in w.orders] == [False]
    assert w.orders[0][0] - busy_at >= 300


def test_a_gap_begins_the_window_again():
    w = world(prefill=Pool(ready=2))
    w.run(290)
    w.prefill = replace(w.prefill, backlog=None)
    w.tick()
    w.prefill = prefill_load(0)
    w.run(290)
    assert w.orders == []
    w.now += 100  # the planner did not run
    w.run(290)
    assert w.orders == []


def test_a_fresh_zero_is_a_zero():
    w = world(prefill=Pool(ready=2))
    w.prefill = prefill_load(0, rate=None)  # no worker was ever busy
    w.run(320)
    assert w.pools[P].count == 1


def test_a_removal_that_ends_within_a_tick_begins_no_window():
    w = world(prefill=Pool(ready=4, drain_s=1.0))
    w.run(320)
    assert w.pools[P].ready == 1
    assert len(w.orders) == 3


# Both


def test_while_workers_start_none_is_removed():
    role = RoleSeen(counts=RoleCounts(starting=1, ready=2))
    seen = Seen(roles={P: role}, manual={P: 1})
    assert plan(PlannerMemory(), seen, LIMITS, 0.0)[1].actions == ()
    there = replace(seen, roles={P: replace(role, counts=RoleCounts(ready=3))})
    assert len(plan(PlannerMemory(), there, LIMITS, 0.0)[1].actions) == 1


def test_the_change_of_the_planner_before_counts_since_it_is_known():
    """Whatever the clock of that planner says."""
    role = RoleSeen(counts=RoleCounts(ready=1), changed=(False, 9e9))
    seen = Seen(roles={P: role}, prefill=prefill_load(3000))
    memory, _ = plan(PlannerMemory(), seen, LIMITS, 0.0)
    memory, proposal = plan(memory, seen, LIMITS, 10.0)
    assert proposal.actions == ()
    assert "no reversal for 50 s" in proposal.roles[P].reason
    seen = replace(seen, roles={P: replace(role, changed=(False, 1.0))})
    memory, proposal = plan(memory, seen, LIMITS, 20.0)
    assert "no reversal for 60 s" in proposal.roles[P].reason
    seen = replace(seen, roles={P: replace(role, changed=(True, 2.0))})
    assert plan(memory, seen, LIMITS, 25.0)[1].actions != ()


@pytest.mark.parametrize("quick", [False, True])
def test_a_start_that_ends_without_a_worker_has_failed(quick: bool):
    """quick: before the next look, or it was refused."""
    seen = Seen(roles={P: RoleSeen(counts=RoleCounts(ready=1))}, manual={P: 2})
    starting = replace(seen, roles={P: RoleSeen(counts=RoleCounts(ready=1, starting=1))})
    memory, now = PlannerMemory(), 0.0
    for failures, wait_s in enumerate((0.0, 30.0, 60.0)):
        now += wait_s
        if failures:
            _, waits = plan(memory, seen, LIMITS, now - 0.1)
            assert waits.actions == ()
            assert f"{failures} starts have failed" in waits.roles[P].reason
        memory, proposal = plan(memory, seen, LIMITS, now)
        memory = begun(memory, proposal.actions[0])
        if not quick:
            memory, _ = plan(memory, starting, LIMITS, now)
        memory, proposal = plan(memory, seen, LIMITS, now)
        assert proposal.actions == ()
    there = replace(seen, roles={P: RoleSeen(counts=RoleCounts(ready=2))})
    memory, _ = plan(memory, starting, LIMITS, now)
    memory, _ = plan(memory, there, LIMITS, now)
    assert plan(memory, seen, LIMITS, now)[1].actions != (), "the one that came is gone"


@pytest.mark.parametrize(
    ("starts", "came"),
    [
        (RoleSeen(counts=RoleCounts(ready=1, starting=1), others=1), RoleCounts(ready=2)),
        (RoleSeen(counts=RoleCounts(ready=2, starting=1)), RoleCounts(ready=2, draining=1)),
    ],
    ids=["of another host", "of its own"],
)
def test_a_worker_that_leaves_meanwhile_makes_no_start_fail(starts: RoleSeen, came: RoleCounts):
    memory, _ = plan(PlannerMemory(), Seen(roles={P: starts}), LIMITS, 0.0)
    for now in (2.0, 4.0):
        memory, _ = plan(memory, Seen(roles={P: RoleSeen(counts=came)}), LIMITS, now)
    assert memory.roles[P].failures == 0


def test_a_change_by_another_writer_is_the_new_base():
    w = world(prefill=Pool(ready=3))
    w.run(290)
    w.pools[P].ready = 4
    w.run(290)
    assert w.orders == []
    w.run(15)
    assert [up for _, _, up in w.orders] == [False]


def test_the_budget_counts_workers_that_others_have_started():
    role = RoleSeen(counts=RoleCounts(ready=1, devices_each=2), others=2)
    assert role.devices == 6
    limits = replace(LIMITS, budget_devices=7)
    seen = Seen(roles={P: role, D: RoleSeen(counts=RoleCounts())}, prefill=prefill_load(90_000))
    memory, _ = plan(PlannerMemory(), seen, limits, 0.0)
    _, proposal = plan(memory, seen, limits, limits.tick_s)
    # The decode worker that the minimum asks for, and no prefill worker.
    assert [(a.role, a.by) for a in proposal.actions] == [(D, 1)]
    assert "no device is free within the budget" in proposal.roles[P].reason


def test_a_start_that_takes_too_long_is_withdrawn_and_the_next_one_waits():
    w = world(prefill=Pool(ready=1, start_s=20.0))
    w.prefill = prefill_load(1500)
    w.run(10)
    w.pools[P].starting = [math.inf]
    proposals = w.run(50)
    withdrawn = [a for p in proposals for a in p.actions if a.kind == "withdraw"]
    assert len(withdrawn) == 1
    assert not w.pools[P].starting
    assert "1 starts have failed" in w.tick().roles[P].reason
    w.pools[P].start_s = math.inf
    starts = []
    for _ in range(200):
        before = len(w.orders)
        w.tick()
        w.pools[P].start_s = 20.0
        if len(w.orders) > before:
            starts.append(w.now)
            w.pools[P].starting = [math.inf]
    pauses = [b - a for a, b in itertools.pairwise(starts)]
    assert len(pauses) >= 2
    assert pauses == sorted(pauses)
    assert pauses[-1] > 1.5 * pauses[0]


def test_a_device_moves_when_its_worker_is_not_needed_any_more():
    w = world(Pool(ready=1), Pool(ready=3), budget_devices=4, down_window_s=100.0)
    w.prefill, w.decode = prefill_load(1200), decode_load(1.2)
    said = w.run(95)[-1].roles[P].reason
    assert said.startswith("no device is free within the budget; 1 more: 1200 tokens/s")
    moves = [action for one in w.run(60) for action in one.actions]
    assert [(one.kind, one.role) for one in moves] == [("remove", D), ("add", P)]
    assert moves[0].reason.startswith("2 are enough")
    assert (w.pools[P].count, w.pools[D].count) == (2, 2)


def test_an_operator_s_number_is_reached_whatever_the_load():
    w = world(Pool(ready=1), Pool(ready=3))
    w.manual = {P: 3, D: 2}
    w.run(100)
    assert (w.pools[P].count, w.pools[D].count) == (3, 2)
    w.manual = {P: 999}
    w.run(1000)
    assert w.pools[P].count == 32


def test_a_number_that_is_reached_stays_when_the_maximum_is_lowered():
    """A role of which an operator has said nothing, in a pause, counts as reached."""
    limits = replace(LIMITS, decode_max=2)
    seen = Seen(roles={D: RoleSeen(counts=RoleCounts(ready=4))}, manual={D: 4})
    assert plan(PlannerMemory(), seen, limits, 0.0)[1].actions == ()
    seen = replace(seen, manual={D: 5})
    assert removes(plan(PlannerMemory(), seen, limits, 0.0)[1], D)


@pytest.mark.parametrize("load", [200, 900, 1700, 4000, 12_000])
def test_a_constant_load_is_met_once_and_for_all(load):
    w = world()
    w.prefill = prefill_load(load)
    w.decode = decode_load(load / 2000)
    w.run(300)
    numbers = w.pools[P].count, w.pools[D].count
    before = len(w.orders)
    w.run(1800)
    assert (w.pools[P].count, w.pools[D].count) == numbers
    assert len(w.orders) == before
    assert all(up for _, _, up in w.orders)


# Limits


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefill_min": 5, "prefill_max": 2}, "prefill-min is 5 and prefill-max is 2"),
        ({"decode_min": 5, "decode_max": 2}, "decode-min is 5 and decode-max is 2"),
        ({"budget_devices": 1}, "more than budget-devices, 1"),
    ],
)
def test_options_that_do_not_fit_together(options, said):
    (mistake,) = contradictions(PlannerOptions(**options))
    assert said in mistake
    assert contradictions(PlannerOptions()) == []


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({P: 4}, []),
        ({P: 2, D: 3}, []),
        ({P: 0}, ["0 prefill workers: prefill-min is 1 and prefill-max is 8"]),
        ({D: 9}, ["9 decode workers: decode-min is 1 and decode-max is 8"]),
    ],
)
def test_what_an_operator_cannot_have(wanted, said):
    assert refusals(wanted, PlannerOptions()) == said

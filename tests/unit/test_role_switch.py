"""When a worker changes its role: the conditions one by one, and invariants under random loads."""

import math
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dynamo_lite.policy.scaling.inputs import Datum, Operation, SwitchHistory
from dynamo_lite.policy.scaling.limits import bounds
from dynamo_lite.policy.scaling.memory import (
    AddWorkers,
    PlannerMemory,
    RemoveWorker,
    SwitchWorker,
    WithdrawStart,
)
from dynamo_lite.policy.scaling.planner import begun, plan
from dynamo_lite.policy.scaling.role_switch import DWELL_S, Unfit, WaitToSwitch, judge
from dynamo_lite.protocol.options import PlannerOptions
from tests.unit.planner_world import D, P, Pool, World, decode_load, prefill_load
from tests.unit.test_planner import OPTIONS

# The down window is so long that nothing is removed before it has to be switched.
FULL = PlannerOptions(budget_devices=4, prefill_max=32, decode_max=32, down_window_s=300.0)


def world(prefill: int, decode: int, limits: PlannerOptions = FULL, **changed: float) -> World:
    """Of switching workers, each with a device, that nothing loads."""
    made = World(
        replace(limits, **changed),
        Pool(ready=prefill, devices_each=1),
        Pool(ready=decode, devices_each=1),
    )
    made.can_switch = True
    made.prefill, made.decode = prefill_load(0), decode_load(0.5)
    return made


def switches(proposals):
    return [a for p in proposals for a in p.actions if isinstance(a, SwitchWorker)]


def others(proposals):
    return [a for p in proposals for a in p.actions if not isinstance(a, SwitchWorker)]


def test_with_a_full_budget_a_worker_changes_its_role():
    w = world(1, 3)
    w.run(100)
    w.prefill = prefill_load(1200)
    proposals = w.run(60)
    (one,) = switches(proposals)
    assert (one.role, one.to) == (D, P)
    assert one.reason.startswith("becomes a prefill worker, drain 10 s and start 20 s: no other")
    assert "decode can do with one less; 1 more: 1200 tokens/s" in one.reason
    assert others(proposals) == []
    assert (w.pools[P].count, w.pools[D].count) == (2, 2)
    said = next(p for p in proposals if switches([p])).roles
    assert "a decode worker becomes one" in said[P].reason
    assert said[D].reason == one.reason


def test_with_room_in_the_budget_a_worker_is_added():
    w = world(1, 2)
    w.run(100)
    w.prefill = prefill_load(1200)
    proposals = w.run(60)
    assert switches(proposals) == []
    assert [a.size for a in others(proposals) if isinstance(a, AddWorkers)] == [1]


def test_where_roles_cannot_be_switched_one_is_removed_and_one_added():
    w = world(1, 3)
    w.can_switch = False
    w.run(100)
    w.prefill = prefill_load(1200)
    kinds = [type(a) for a in others(w.run(60))]
    assert kinds == [RemoveWorker, AddWorkers]
    assert w.switches == []


def test_the_giver_must_pass_its_own_check():
    w = world(1, 3)
    w.decode = decode_load(2.4)
    w.run(100)
    w.prefill = prefill_load(1200)
    assert switches(w.run(300)) == []


def test_the_giver_must_pass_its_check_for_the_cooldown():
    w = world(1, 3, cooldown_s=60.0)
    w.decode = decode_load(2.4)
    w.run(100)
    w.prefill, w.decode = prefill_load(1200), decode_load(0.5)
    calm_at = w.now
    w.run(120)
    assert len(w.switches) == 1
    assert w.switches[0][0] - calm_at >= 60


def test_an_unknown_load_gives_nobody():
    w = world(1, 3)
    w.run(100)
    w.decode = replace(w.decode, kv_used=Datum(0.5, age_s=100.0))
    w.prefill = prefill_load(1200)
    assert switches(w.run(200)) == []


def test_a_worker_that_is_due_to_go_changes_its_role_instead():
    """Its removal was decided in the tick in which the other role needs one."""
    w = world(1, 3, down_window_s=100.0)
    w.run(90)
    w.prefill = prefill_load(1200)
    proposals = w.run(30)
    assert len(switches(proposals)) == 1
    assert others(proposals) == []


@pytest.mark.parametrize(("prefill_min", "decode_min", "left"), [(1, 3, 3), (1, 2, 2), (1, 1, 1)])
def test_never_below_the_minimum(prefill_min: int, decode_min: int, left: int):
    w = world(1, 3, prefill_min=prefill_min, decode_min=decode_min)
    w.decode = decode_load(0.0)
    w.run(100)
    w.prefill = prefill_load(20_000)
    w.run(3000)
    assert w.pools[D].ready == left


def test_a_role_that_gave_a_worker_gets_none_back_within_the_dwell():
    w = world(1, 3, cooldown_s=10.0)
    w.run(100)
    w.prefill = prefill_load(1200)
    w.run(60)
    (first,) = w.switches
    w.prefill, w.decode = prefill_load(0), decode_load(2.4)
    waiting = w.run(60)[-1]
    assert "it gave a worker itself: none back for" in waiting.roles[D].reason
    w.run(400)
    assert [giver for _, giver in w.switches] == [D, P]
    assert w.switches[1][0] - first[0] >= DWELL_S


def test_the_same_direction_has_no_dwell_but_one_switch_at_a_time():
    w = world(1, 3)
    w.run(100)
    w.prefill = prefill_load(2300)
    w.decode = decode_load(0.1)
    w.run(300)
    (first, _), (second, _) = w.switches
    assert second - first >= 30  # drain and start of the first one
    assert second - first < DWELL_S
    assert (w.pools[P].count, w.pools[D].count) == (3, 1)


def test_no_switch_while_a_device_becomes_free_anyway():
    w = world(1, 2)
    w.pools[P].draining = [w.now + 140.0]
    w.run(100)
    w.prefill = prefill_load(1200)
    proposals = w.run(100)
    assert switches(proposals) == []
    assert w.pools[P].count == 2
    said = [p.roles[P].reason for p in proposals]
    assert any("a worker drains: its device is free as soon" in text for text in said)


@pytest.mark.parametrize(
    ("switch_s", "expected"), [(None, WaitToSwitch), (5.0, SwitchWorker), (60.0, WaitToSwitch)]
)
def test_the_quicker_way_is_taken(switch_s: float | None, expected: type):
    w = world(1, 2)
    w.pools[D].draining = [math.inf]
    seen = replace(w.seen(), switches=SwitchHistory(drain_s=10.0, start_s=switch_s))
    removal = RemoveWorker(role=D, starting=False, reason="test")
    assert isinstance(judge(seen, removal, P, "test", w.limits), expected)


@pytest.mark.parametrize(
    ("prefill_devices", "starting", "expected"),
    [(1, False, SwitchWorker), (2, False, Unfit), (0, False, SwitchWorker), (1, True, Unfit)],
)
def test_what_a_switch_cannot_do(prefill_devices: int, starting: bool, expected: type):
    w = world(1, 3)
    w.pools[P].devices_each = prefill_devices
    removal = RemoveWorker(role=D, starting=starting, reason="test")
    assert isinstance(judge(w.seen(), removal, P, "test", w.limits), expected)


@pytest.mark.parametrize("role", [P, D])
def test_no_switch_beside_another_change(role):
    w = world(1, 3)
    seen = w.seen()
    busy = replace(seen.roles[role], operations=(Operation(id=1, kind="remove", age_s=5.0),))
    seen = replace(seen, roles={**seen.roles, role: busy})
    removal = RemoveWorker(role=D, starting=False, reason="test")
    assert isinstance(judge(seen, removal, P, "test", w.limits), WaitToSwitch)


def test_a_switch_is_a_change_of_both_roles():
    memory = begun(PlannerMemory(), SwitchWorker(role=D, to=P, reason="test"), 7.0)
    changed = {role: (one.changed_up, one.changed_at) for role, one in memory.roles.items()}
    assert changed == {D: (False, 7.0), P: (True, 7.0)}


def test_nothing_else_changes_during_a_switch():
    w = world(1, 3)
    seen = w.seen()
    giving = replace(seen.roles[D], operations=(Operation(id=1, kind="give", age_s=5.0),))
    taking = replace(seen.roles[P], operations=(Operation(id=1, kind="take", age_s=0.0),))
    seen = replace(seen, roles={P: taking, D: giving}, manual={P: 3, D: 1})
    _, proposal = plan(PlannerMemory(), seen, w.limits, 0.0)
    assert proposal.actions == ()
    assert "a switch from the other role is under way" in proposal.roles[P].reason
    assert "a switch to the other role is under way" in proposal.roles[D].reason


def test_a_start_that_takes_too_long_is_withdrawn_and_the_next_one_waits():
    w = world(1, 3)
    w.run(100)
    w.prefill = prefill_load(1200)
    w.pools[P].start_s = math.inf
    proposals = w.run(40)
    assert len(switches(proposals)) == 1
    w.pools[P].start_s = 20.0
    proposals = w.run(60)
    (withdrawn,) = [a for a in others(proposals) if isinstance(a, WithdrawStart)]
    assert withdrawn.role is P
    assert w.switch is None
    assert any("1 starts have failed" in p.roles[P].reason for p in proposals)


def test_what_an_operator_sets_is_switched_at_once_and_whatever_the_dwell():
    w = world(2, 1, budget_devices=3)
    w.prefill, w.decode = prefill_load(1200), decode_load(0.5)
    w.manual = {P: 1, D: 2}
    w.run(60)
    w.manual = {P: 2, D: 1}
    w.run(60)
    assert [giver for _, giver in w.switches] == [P, D]
    assert w.orders == []
    assert (w.pools[P].count, w.pools[D].count) == (2, 1)


def test_while_held_it_says_what_it_would_do():
    w = world(1, 3)
    w.run(100)
    w.prefill, w.hold = prefill_load(1200), "dry run"
    proposal = w.run(10)[-1]
    assert [type(a) for a in proposal.held] == [SwitchWorker]
    assert proposal.actions == ()


# Invariants

EVENTS = st.sampled_from(
    ["none"] * 6
    + ["prefill", "decode"] * 3
    + ["burst", "calm", "stale", "kill", "foreign", "stuck", "hold", "away"]
)
TICKS = st.lists(
    st.tuples(EVENTS, st.sampled_from([P, D]), st.sampled_from([0.5, 1, 4])),
    min_size=20,
    max_size=60,
)
SIZES = st.tuples(st.integers(1, 8), st.integers(1, 8))


class Checked(World):
    """Checks each proposal against what it saw."""

    def tick(self):
        self.now += self.limits.tick_s
        self.pass_switch()
        for pool in self.pools.values():
            self._pass_time(pool)
        seen = self.seen()
        self.memory, proposal = plan(self.memory, seen, self.limits, self.now)
        for action in proposal.actions:
            if isinstance(action, SwitchWorker):
                self.check(seen, proposal, action)
        for action in proposal.actions:
            self._do(action)
        return proposal

    def check(self, seen, proposal, action):
        giver, taker = seen.roles[action.role], seen.roles[action.to]
        least, _ = bounds(self.limits, action.role)
        _, most = bounds(self.limits, action.to)
        assert action.reason
        assert not giver.operations and not taker.operations and self.switch is None
        assert giver.count - 1 >= least
        assert giver.serving >= 2
        assert taker.count + 1 <= most
        assert taker.devices_each <= giver.devices_each
        assert [a for a in proposal.actions if a.role in (action.role, action.to)] == [action]
        room = self.limits.budget_devices - sum(role.devices for role in seen.roles.values())
        assert room < taker.devices_each or (taker.counts.devices_each > taker.counts.devices_free)
        if not seen.manual and self.switches and self.switches[-1][1] == action.to:
            assert self.now - self.switches[-1][0] >= DWELL_S
        # Its load is known, and fewer were enough for the cooldown.
        memory = self.memory.role(action.role)
        if giver.count <= bounds(self.limits, action.role)[1] and not seen.manual:
            assert memory.known_since is not None
            assert self.now - memory.known_since >= min(
                self.limits.cooldown_s, self.limits.down_window_s
            )
            assert memory.needs[-1][1] < giver.count

    def event(self, kind, role, size):
        pool = self.pools[role]
        self.hold, self.reachable = "", True
        match kind:
            case "burst":
                self.prefill = prefill_load(5000 * size, backlog=3000 * size)
            case "calm":
                self.prefill = prefill_load(10 * size)
                self.decode = decode_load(0.1 * size)
            case "prefill":
                self.prefill = prefill_load(5000 * size)
                self.decode = decode_load(0.1)
            case "decode":
                self.prefill = prefill_load(100)
                self.decode = decode_load(5 * size, 400 * size)
            case "stale":
                self.decode = replace(self.decode, kv_used=Datum(0.0, age_s=100.0))
            case "kill" | "foreign":
                pool.ready = max(pool.ready + (1 if kind == "foreign" else -1), 0)
            case "stuck":
                pool.starting = [math.inf for _ in pool.starting]
            case "hold":
                self.hold = "paused"
            case "away":
                self.reachable = False


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(OPTIONS, SIZES, st.sampled_from([1.0, 20.0, 90.0]), TICKS)
def test_whatever_happens_every_switch_keeps_the_rules(limits, sizes, start_s, ticks):
    # Switches are for full budgets.
    limits = replace(limits, budget_devices=sum(sizes), prefill_max=25, decode_max=25)
    prefill, decode = (Pool(ready=size, devices_each=1, start_s=start_s) for size in sizes)
    w = Checked(limits, prefill, decode)
    w.can_switch = True
    w.prefill, w.decode = prefill_load(0), decode_load(0)
    for kind, role, size in ticks:
        w.event(kind, role, size)
        for _ in range(4):
            w.tick()


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.tuples(st.sampled_from([P, D]), st.integers(1, 30)), min_size=5, max_size=40))
def test_alternating_loads_on_a_full_budget_switch_and_never_leave_it(phases):
    limits = replace(FULL, cooldown_s=10.0, down_window_s=600.0, budget_devices=6)
    w = Checked(limits, Pool(ready=3, devices_each=1), Pool(ready=3, devices_each=1))
    w.can_switch = True
    for role, ticks in phases:
        w.prefill = prefill_load(3500 if role is P else 10)
        w.decode = decode_load(0.3 if role is P else 4.0)
        for _ in range(ticks * 4):
            w.tick()
            present = sum(p.count + len(p.draining) for p in w.pools.values())
            assert present <= 6
            assert min(p.ready for p in w.pools.values()) >= 1

"""A role without room in the budget: one worker of the other role is removed, then one is added."""

import math
from dataclasses import replace

import pytest

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.planner import Proposal
from dynamo_lite.protocol.options import PlannerOptions
from tests.unit.planner_world import D, P, Pool, World, decode_load, prefill_load

# The down window is so long that nothing is removed before its device is needed.
FULL = PlannerOptions(
    budget_devices=4,
    prefill_max=32,
    decode_max=32,
    down_window_s=300.0,
    start_s=20.0,
    start_timeout_s=40.0,
)


class FullWorld(World):
    """Each worker has a device. Every tick keeps to the budget, and leaves both roles a worker."""

    def __init__(self, prefill: int, decode: int, limits: PlannerOptions = FULL):
        pools = (Pool(ready=number, devices_each=1) for number in (prefill, decode))
        super().__init__(limits, *pools)
        self.prefill, self.decode = prefill_load(0), decode_load(0.5)

    def tick(self) -> Proposal:
        proposal = super().tick()
        present = sum(one.count + len(one.draining) for one in self.pools.values())
        assert present <= self.limits.budget_devices
        assert min(one.ready for one in self.pools.values()) >= 1
        return proposal

    @property
    def numbers_of(self) -> tuple[int, int]:
        return self.pools[P].count, self.pools[D].count


def world(prefill: int, decode: int, **changed: float) -> FullWorld:
    return FullWorld(prefill, decode, replace(FULL, **changed))


def changes(proposals: list[Proposal]) -> list[tuple[str, Role]]:
    return [(change.kind, change.role) for one in proposals for change in one.actions]


MOVED = [("remove", D), ("add", P)]


def test_a_device_moves_from_one_role_to_the_other():
    w = world(1, 3)
    w.run(100)
    w.prefill = prefill_load(1200)
    proposals = w.run(60)
    assert changes(proposals) == MOVED
    removed, added = (action for one in proposals for action in one.actions)
    assert removed.reason == "makes room for a prefill worker"
    assert added.reason.startswith("1 more: 1200 tokens/s")
    said = next(one for one in proposals if one.actions).roles[P].reason
    assert said.startswith("no device is free within the budget; a decode worker is removed for it")
    assert w.numbers_of == (2, 2)


def test_the_giver_must_pass_its_check_for_the_cooldown():
    w = world(1, 3, cooldown_s=60.0)
    w.decode = decode_load(2.4)
    w.run(100)
    w.prefill, w.decode = prefill_load(1200), decode_load(0.5)
    calm_at = w.now
    w.run(120)
    assert [role for _, role, _ in w.orders] == [D, P]
    assert w.orders[0][0] - calm_at >= 60


def test_a_removal_that_is_due_makes_the_room():
    """It was decided in the tick in which the other role needs one."""
    w = world(1, 3, down_window_s=100.0)
    w.decode = decode_load(1.2)
    w.run(95)
    w.prefill = prefill_load(1200)
    proposals = w.run(60)
    assert changes(proposals) == MOVED
    removed = next(action for one in proposals for action in one.actions)
    assert removed.reason.startswith("2 are enough")


@pytest.mark.parametrize(("decode_min", "left"), [(3, 3), (2, 2), (1, 1)])
def test_never_below_the_minimum(decode_min: int, left: int):
    w = world(1, 3, decode_min=decode_min)
    w.decode = decode_load(0.0)
    w.run(100)
    w.prefill = prefill_load(20_000)
    w.run(3000)
    assert w.pools[D].ready == left
    assert w.pools[P].ready == 4 - left


@pytest.mark.parametrize("role", [P, D])
def test_no_worker_is_removed_while_a_device_becomes_free_anyway(role: Role):
    w = world(1, 2)
    w.pools[role].draining = [w.now + 140.0]
    w.run(100)
    w.prefill = prefill_load(1200)
    assert changes(w.run(100)) == [("add", P)]


def test_a_role_with_larger_workers_gets_as_many_devices_as_one_needs():
    w = world(1, 3, budget_devices=5)
    w.pools[P].devices_each = 2
    w.run(100)
    w.prefill = prefill_load(1200)
    w.decode = decode_load(0.1)
    assert changes(w.run(100)) == [("remove", D), ("remove", D), ("add", P)]


def test_a_start_that_hangs_is_withdrawn_and_the_device_is_free():
    w = world(1, 3)
    w.run(100)
    w.prefill = prefill_load(1200)
    w.pools[P].start_s = math.inf
    w.run(60)
    assert w.pools[P].starting == [math.inf]
    w.pools[P].start_s = 20.0
    w.run(60)
    w.prefill, w.decode = prefill_load(0), decode_load(2.4)
    w.run(200)
    assert w.numbers_of == (1, 3)

"""A role without room in the budget waits until a worker of the other role has left."""

import math
from dataclasses import replace

import pytest

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.planner import Proposal
from dynamo_lite.protocol.options import PlannerOptions
from tests.unit.planner_world import D, P, Pool, World, decode_load, prefill_load

FULL = PlannerOptions(
    budget_devices=4,
    prefill_max=32,
    decode_max=32,
    down_window_s=100.0,
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


def test_a_device_moves_when_its_worker_is_not_needed_any_more():
    w = world(1, 3)
    w.decode = decode_load(1.2)
    w.prefill = prefill_load(1200)
    proposals = w.run(95)
    said = proposals[-1].roles[P].reason
    assert said.startswith("no device is free within the budget; 1 more: 1200 tokens/s")
    proposals = w.run(60)
    assert changes(proposals) == [("remove", D), ("add", P)]
    removed, added = (action for one in proposals for action in one.actions)
    assert removed.reason.startswith("2 are enough")
    assert added.reason.startswith("1 more: 1200 tokens/s")
    assert w.numbers_of == (2, 2)


@pytest.mark.parametrize(("decode_min", "left"), [(3, 3), (2, 2), (1, 1)])
def test_never_below_the_minimum(decode_min: int, left: int):
    w = world(1, 3, decode_min=decode_min)
    w.decode = decode_load(0.0)
    w.run(100)
    w.prefill = prefill_load(20_000)
    w.run(3000)
    assert w.pools[D].ready == left
    assert w.pools[P].ready == 4 - left


def test_a_role_with_larger_workers_gets_as_many_devices_as_one_needs():
    w = world(1, 3, budget_devices=5)
    w.pools[P].devices_each = 2
    w.run(100)
    w.prefill = prefill_load(1200)
    w.decode = decode_load(0.1)
    assert changes(w.run(100)) == [("remove", D), ("remove", D), ("add", P)]


def test_a_start_that_hangs_is_withdrawn_and_the_device_is_free():
    w = world(1, 3)
    w.prefill = prefill_load(1200)
    w.pools[P].start_s = math.inf
    w.run(130)
    assert w.pools[P].starting == [math.inf]
    w.pools[P].start_s = 20.0
    w.run(60)
    w.prefill, w.decode = prefill_load(0), decode_load(2.4)
    w.run(200)
    assert w.numbers_of == (1, 3)

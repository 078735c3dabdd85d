"""The invariants of planners: what each order, record and end of a worker must satisfy.

No change follows the load soon after one in the other direction.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aetcd import rpc

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.limits import bounds
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.planner import LeaderRecord, WantedRecord, WantedWorkers
from tests.simulation.processes import NAMESPACE, Slot
from tests.simulation.scenario import PlannerScenario, Step
from tests.simulation.supervisor import SimSupervisor

if TYPE_CHECKING:
    from tests.simulation.world import World

#: The reasons of changes that follow the load.
_ENOUGH, _MORE = re.compile(r"\d+ are enough"), re.compile(r"\d+ more")

#: How old an order may be when it arrives: its numbers and members are this old.
_ORDER_S = 3.0


@dataclass
class Reign:
    """A planner that leads, by its lease."""

    lease_id: int
    #: None: still.
    until: float | None = None


class PlannerJudge:
    """Sees the supervisor's orders, under the names of the planners' slots. The caller reports each
    revision of etcd (`committed`).

    on_step: called when the record says so, or an order was taken, after that was judged.
    """

    def __init__(
        self,
        world: "World",
        scenario: PlannerScenario,
        supervisor: SimSupervisor,
        *,
        on_step: Callable[[Step], None],
    ):
        self._world, self.scenario, self.supervisor = world, scenario, supervisor
        self.judge, self._lease_ttl_s = world.judge, world.scenario.lease_ttl_s
        self.on_step = on_step
        self.reigns: list[Reign] = []
        #: When etcd has lost its data.
        self.wiped_at = -1e9
        self._left_at: dict[str, float] = {}
        self._wanted = WantedRecord()
        #: When the last change of each component was stored.
        self._changed_at: dict[str, float] = {}

    # Orders

    def adding(self, who: str, component: str) -> None:
        self._may_order(who, f"one more {component}")

    def added(self, component: str) -> None:
        self.judge.counts["planner added"] += 1
        options, role = self.scenario.options, Role(component)
        own = self.supervisor.number(component)
        present = sum(each.present for each in self.supervisor.counts().values())
        if own > (most := bounds(options, role)[1]):
            self._violate(f"{own} {component} were started, and {most} are the most")
        if present > options.budget_devices:
            self._violate(
                f"{present} devices are occupied, and the budget is {options.budget_devices}"
            )
        if self._settled() and own > (wanted := self._number(component)):
            self._violate(f"{own} {component} were started, and {wanted} are wanted")
        self.on_step(Step.ADD_ORDERED)

    def removing(self, who: str, worker: Slot) -> None:
        self._may_order(who, f"the end of {worker.name}")
        self.judge.counts["planner removed"] += 1
        # A withdrawn start did not count for the minimum.
        if worker.phase == "ready":
            self._check_minimum(worker, self.supervisor.number(worker.component) - 1)
        if worker.lease_id:
            self._check_not_last(worker)
        self._check_wanted(worker)
        ready = worker.phase == "ready"
        self.on_step(Step.REMOVE_ORDERED if ready else Step.WITHDRAW_ORDERED)

    def _check_wanted(self, worker: Slot) -> None:
        """Before a worker is removed."""
        component = worker.component
        left, wanted = self.supervisor.number(component) - 1, self._number(component)
        if self._settled() and left < wanted:
            self._violate(f"{worker.name} is removed, and {wanted} {component} are wanted")

    def _number(self, component: str) -> int:
        """What is wanted."""
        role = self._wanted.roles.get(component)
        return 0 if role is None else role.count

    def _check_minimum(self, worker: Slot, left: int) -> None:
        least = bounds(self.scenario.options, Role(worker.component))[0]
        if left < least:
            self._violate(f"{worker.name} is removed, and {left} are fewer than {least}")

    def _check_not_last(self, worker: Slot) -> None:
        """Checks that another worker serves, or did when the planner looked."""
        now = self.judge.now()
        seen_s = self._lease_ttl_s + _ORDER_S
        for one in self.supervisor.workers(worker.component):
            if one is worker or one.phase != "ready":
                continue
            if one.name in self._world.ready or self._left_at.get(one.name, -1e9) > now - seen_s:
                return
        self._violate(f"{worker.name} is removed, and it is the last one that serves")

    # Records

    def committed(self, events: list[Any]) -> None:
        """A revision of etcd."""
        prefix = names.planner_prefix(NAMESPACE)
        for event in events:
            key = event.kv.key.decode()
            value = event.kv.value if event.type == rpc.Event.PUT else None
            if not key.startswith(prefix):
                continue
            if key == names.planner_leader_key(NAMESPACE):
                self._leads(value)
            elif key == names.planner_wanted_key(NAMESPACE):
                before = self._wanted
                self._wanted = WantedRecord() if value is None else decode_json(value, WantedRecord)
                for component, role in self._wanted.roles.items():
                    self._changed(component, before.roles.get(component), role)

    def wiped(self) -> None:
        """etcd has lost its data."""
        self.wiped_at = self.judge.now()
        self._leads(None)
        self._wanted = WantedRecord()
        self._changed_at.clear()

    def _leads(self, value: bytes | None) -> None:
        if self.reigns and self.reigns[-1].until is None:
            self.reigns[-1].until = self.judge.now()
        if value is not None:
            self.reigns.append(Reign(decode_json(value, LeaderRecord).lease_id))
            self.judge.counts["planner elected"] += 1

    # The wanted numbers

    def _changed(self, component: str, before: WantedWorkers | None, role: WantedWorkers) -> None:
        now = self.judge.now()
        if before is not None and (before.up, before.at) == (role.up, role.at):
            if role.count < before.count:
                self.on_step(Step.WITHDRAW_WANTED)
            return
        if before is not None and before.up is not role.up and component in self._changed_at:
            passed_s = now - self._changed_at[component]
            self._check_reversal(component, role.up, role.reason, passed_s)
        self._changed_at[component] = now
        self.on_step(Step.ADD_WANTED if role.up else Step.REMOVE_WANTED)

    def _check_reversal(self, component: str, up: bool, reason: str, passed_s: float) -> None:
        """passed_s: since its last change, which went the other way."""
        follows_load = (_MORE if up else _ENOUGH).match(reason)
        if follows_load and passed_s < self.scenario.options.cooldown_s:
            self._violate(f"a reversal after {passed_s:.3f} s: {component}, {reason}")

    # Ends

    def left(self, name: str) -> None:
        """A worker's process has ended."""
        self._left_at[name] = self.judge.now()

    def unsettled(self) -> str | None:
        """What planners still have to do, as text; None if the numbers are those of an idle
        graph."""
        for role in Role:
            counts = self.supervisor.counts()[role]
            least = bounds(self.scenario.options, role)[0]
            if (counts.starting, counts.ready, counts.draining) != (0, least, 0):
                return f"{role}: {counts}, and {least} would do"
        return None

    def _may_order(self, who: str, what: str) -> None:
        if self.scenario.is_dry(int(who.partition("-")[2])):
            self._violate(f"{who} orders {what}, and it is in a dry run")
        slot = self._world.slots.get(who)
        if slot is None or slot.host is None:
            return
        recent = self.judge.now() - self._lease_ttl_s
        if not any(
            reign.lease_id == slot.host.lease.id and (reign.until is None or reign.until >= recent)
            for reign in self.reigns
        ):
            self._violate(f"{who} orders {what}, and it does not lead")

    def _settled(self) -> bool:
        """Whether orders that come now were decided with what etcd has."""
        return self.judge.now() - self.wiped_at > _ORDER_S

    def _violate(self, text: str) -> None:
        self.judge.violate(f"planner: {text}")

"""The invariants of planners: what each order, record and end of a worker must satisfy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aetcd import rpc

from dynamo_lite.policy.scaling.inputs import Role
from dynamo_lite.policy.scaling.limits import bounds
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.planner import LeaderRecord, OperationRecord
from dynamo_lite.services.planner.connector import COMPONENTS
from tests.simulation.engine.assembly import SimEngineProcess
from tests.simulation.engine.halves import DecodeHalves
from tests.simulation.graph_supervisor import SimSupervisor, Worker
from tests.simulation.invariants import Judge
from tests.simulation.operation_invariants import OperationJudge
from tests.simulation.planner_scenario import PlannerScenario
from tests.simulation.supervisor import Slot

#: How old an order may be when it arrives: its numbers and members are this old.
_ORDER_S = 3.0
_DECODE = "VllmWorker", "generate"


@dataclass
class Reign:
    """A planner that leads, by its lease."""

    lease_id: int
    #: None: still.
    until: float | None = None


@dataclass
class PlannerJudge:
    """Implements Watcher. The caller reports each revision of etcd (`committed`) and the
    broker's outages. slots: of all processes by name; a planner orders under its slot's name."""

    judge: Judge
    scenario: PlannerScenario
    supervisor: SimSupervisor
    namespace: str
    lease_ttl_s: float
    slots: dict[str, Slot]
    #: Ready processes by name.
    ready: dict[str, float]
    #: Called when a record gets a phase, after it was judged.
    on_step: Callable[[OperationRecord], None] = lambda record: None
    #: Called with "add" or "remove" when the supervisor has taken such an order.
    on_order: Callable[[str], None] = lambda kind: None
    reigns: list[Reign] = field(default_factory=list[Reign])
    #: When an operator has changed the numbers, or etcd has lost its data.
    changed_at: float = -1e9
    wiped_at: float = -1e9
    _left_at: dict[str, float] = field(default_factory=dict[str, float])
    #: Keys of the decode workers that are registered.
    _listed: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        counts, options = self.judge.counts, self.scenario.options
        self._operations = OperationJudge(
            self._violate, counts, self.judge.now, options, self.supervisor, self.scenario.pods
        )

    # Watcher

    def adding(self, who: str, component: str) -> None:
        self._may_order(who, f"one more {component}")

    def added(self, who: str, component: str) -> None:
        self.judge.counts["planner added"] += 1
        self.on_order("add")
        if not self._is_planner(who):
            return
        counts = self.supervisor.counts()
        own = counts[component].starting + counts[component].ready
        options, role = self.scenario.options, _role(component)
        present = sum(each.present for each in counts.values())
        if self._settled(self.changed_at):
            if own > (most := bounds(options, role)[1]):
                self._violate(f"{own} {component} were started, and {most} are the most")
            if present > options.budget_devices:
                self._violate(
                    f"{present} devices are occupied, and the budget is {options.budget_devices}"
                )
            self._check_added_once(component, own)

    def _check_added_once(self, component: str, own: int) -> None:
        if not self._settled(self.wiped_at):
            return
        records = [one.record for one in self._operations.of(component)]
        wanted = [record.count for record in records if record.kind == "add"]
        if not wanted:
            self._violate(f"a {component} was added, and no record of an operation says so")
        elif own > max(wanted):
            self._violate(f"{own} {component} were started, and the operation wanted {wanted}")

    def removing(self, who: str, worker: Worker) -> None:
        self._may_order(who, f"the end of {worker.slot.name}")
        self.judge.counts["planner removed"] += 1
        self.on_order("remove")
        if not self._is_planner(who):
            return
        # A withdrawn start did not count for the minimum.
        if worker.phase == "ready":
            self._check_minimum(worker)
        if worker.lease_id:
            self._check_not_last(worker)
        if self._settled(self.wiped_at):
            named = [one.record.lease_id for one in self._operations.of(worker.component)]
            if worker.lease_id not in named and 0 not in named:
                self._violate(
                    f"{worker.slot.name} is removed, and no record of an operation says so"
                )

    def _check_minimum(self, worker: Worker) -> None:
        counts = self.supervisor.counts()[worker.component]
        least = bounds(self.scenario.options, _role(worker.component))[0]
        own = counts.starting + counts.ready - 1
        if own < least and self._settled(self.changed_at):
            self._violate(f"{worker.slot.name} is removed, and {own} are fewer than {least}")

    def _check_not_last(self, worker: Worker) -> None:
        """Checks that another worker serves, or did when the planner looked."""
        now = self.judge.now()
        seen_s = self.lease_ttl_s + _ORDER_S
        for one in self.supervisor.workers:
            if one.component != worker.component or one is worker or one.phase != "ready":
                continue
            name = one.slot.name
            if name in self.ready or self._left_at.get(name, -1e9) > now - seen_s:
                return
        self._violate(f"{worker.slot.name} is removed, and it is the last one that serves")

    def killing(self, who: str, worker: Worker) -> None:
        self.judge.counts["planner killed"] += 1
        lease_id = worker.last_lease
        for one in self._operations.of(worker.component):
            late = self.judge.now() - one.since >= one.record.within_s
            if one.record.lease_id == lease_id and late:
                self.judge.counts["planner killed late"] += 1
                return
        if why := self._unsafe(worker.slot, lease_id):
            self._violate(f"{worker.slot.name} is killed, and {why}")

    def _unsafe(self, slot: Slot, lease_id: int) -> str:
        """Why its end would be unsafe; empty if it is safe."""
        for engine in self.judge.engines():
            halves = engine.halves
            if not isinstance(halves, DecodeHalves):
                continue
            writers = halves.writers()
            if engine.setup.address != slot.name:
                # A planner cannot ask one that has lost its lease, whose own deadlines keep the
                # blocks.
                if lease_id in writers and self._is_listed(engine):
                    return f"{engine.setup.address} may still be written by it"
            elif engine.core.is_wanted:
                return "it has requests"
            elif writers:
                return "it may still be written into"
        return ""

    def _is_listed(self, engine: SimEngineProcess) -> bool:
        lease_id = engine.setup.engine_config.lease_id
        return names.endpoint_key(self.namespace, *_DECODE, lease_id) in self._listed

    # Records

    def committed(self, events: list[Any]) -> None:
        """A revision of etcd."""
        prefix = names.planner_prefix(self.namespace)
        for event in events:
            key = event.kv.key.decode()
            value = event.kv.value if event.type == rpc.Event.PUT else None
            if key.startswith(names.endpoint_prefix(self.namespace, *_DECODE)):
                (self._listed.discard if value is None else self._listed.add)(key)
            if not key.startswith(prefix):
                continue
            if key == names.planner_leader_key(self.namespace):
                self._leads(value)
            elif key.startswith(names.planner_operations_prefix(self.namespace)):
                self._operation(key, value)
            elif key == names.planner_target_key(self.namespace):
                self._operations.wanted(value)

    def wiped(self) -> None:
        """etcd has lost its data."""
        self.wiped_at = self.judge.now()
        self._listed.clear()
        self._leads(None)
        self._operations.wiped()

    def _leads(self, value: bytes | None) -> None:
        if self.reigns and self.reigns[-1].until is None:
            self.reigns[-1].until = self.judge.now()
        if value is not None:
            self.reigns.append(Reign(decode_json(value, LeaderRecord).lease_id))
            self.judge.counts["planner elected"] += 1

    def _operation(self, key: str, value: bytes | None) -> None:
        if (record := self._operations.stored(key, value)) is None:
            return
        if record.phase == "leaving":
            worker = self.supervisor.find(record.component, record.lease_id)
            self._check_minimum(worker)
            self._check_not_last(worker)
        self.on_step(record)

    # Ends

    def broker_was_away(self, began: float, ended: float) -> None:
        self._operations.outages.append((began, ended))

    def left(self, name: str) -> None:
        """A worker's process has ended."""
        self._left_at[name] = self.judge.now()

    def unsettled(self) -> str | None:
        """What planners still have to do, as text; None if the numbers are those of an idle
        graph."""
        if why := self._operations.unsettled():
            return why
        for role, component in COMPONENTS.items():
            counts = self.supervisor.counts()[component]
            least = bounds(self.scenario.options, role)[0]
            if (counts.starting, counts.ready, counts.draining) != (0, least, 0):
                return f"{component}: {counts}, and {least} would do"
        return None

    def _may_order(self, who: str, what: str) -> None:
        if not self._is_planner(who):
            return
        if self.scenario.is_dry(int(who.partition("-")[2])):
            self._violate(f"{who} orders {what}, and it is in a dry run")
        host = self.slots[who].host
        if host is None:
            return
        recent = self.judge.now() - self.lease_ttl_s
        if not any(
            reign.lease_id == host.lease.id and (reign.until is None or reign.until >= recent)
            for reign in self.reigns
        ):
            self._violate(f"{who} orders {what}, and it does not lead")

    def _settled(self, since: float) -> bool:
        return self.judge.now() - since > _ORDER_S

    def _is_planner(self, who: str) -> bool:
        return who.startswith("planner")

    def _violate(self, text: str) -> None:
        self.judge.violate(f"planner: {text}")


def _role(component: str) -> Role:
    return next(role for role, name in COMPONENTS.items() if name == component)

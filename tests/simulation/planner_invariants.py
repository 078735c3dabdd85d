"""The invariants of planners: what each order, record and end of a worker must satisfy.

No operation follows the load soon after one in the other direction.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aetcd import rpc

from dynamo_lite.planner.connector import COMPONENTS
from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.limits import bounds
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.planner import Change, LeaderRecord, OperationRecord, TargetRecord
from tests.simulation.engine.assembly import SimEngineProcess
from tests.simulation.engine.halves import DecodeHalves
from tests.simulation.graph_supervisor import SimSupervisor, Worker
from tests.simulation.loop.loop import EPOCH_S, START_S
from tests.simulation.scenario import PlannerScenario
from tests.simulation.supervisor import NAMESPACE, Slot

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Phases of one operation follow each other in this order.
_PHASES = {"add": ("ordered", "asked", "withdrawing"), "remove": ("ordered", "leaving", "asked")}
#: The reasons of changes that follow the load.
_ENOUGH, _ROOM, _MORE = (
    re.compile(start) for start in (r"\d+ are enough", "makes room for", r"\d+ more")
)


#: How old an order may be when it arrives: its numbers and members are this old.
_ORDER_S = 3.0
_DECODE = "VllmWorker", "generate"


@dataclass(frozen=True)
class Tracked:
    """An operation that is under way."""

    record: OperationRecord
    #: When its record was first stored, and when it was first stored with its present phase.
    since: float
    entered: float


@dataclass
class Reign:
    """A planner that leads, by its lease."""

    lease_id: int
    #: None: still.
    until: float | None = None


class PlannerJudge:
    """Sees the supervisor's orders, under the names of the planners' slots. The caller reports each
    revision of etcd (`committed`).

    on_step: called when a record gets a phase, after it was judged. on_order: called with "add" or
    "remove" when the supervisor has taken such an order.
    """

    def __init__(
        self,
        world: "World",
        scenario: PlannerScenario,
        supervisor: SimSupervisor,
        *,
        on_step: Callable[[OperationRecord], None],
        on_order: Callable[[str], None],
    ):
        self._world, self.scenario, self.supervisor = world, scenario, supervisor
        self.judge, self._lease_ttl_s = world.judge, world.scenario.lease_ttl_s
        self.on_step, self.on_order = on_step, on_order
        self.reigns: list[Reign] = []
        #: When etcd has lost its data.
        self.wiped_at = -1e9
        self._left_at: dict[str, float] = {}
        #: Keys of the decode workers that are registered.
        self._listed: set[str] = set()
        #: Operations in etcd now, by key.
        self._under_way: dict[str, Tracked] = {}
        #: Whose records etcd has lost: a planner may still carry them out.
        self._lost: list[Tracked] = []
        #: The last change of each component, and when it was stored.
        self._changes: dict[str, tuple[Change, float]] = {}
        #: Components whose last removal has made room for another one.
        self._gave: set[str] = set()

    # Orders

    def adding(self, who: str, component: str) -> None:
        self._may_order(who, f"one more {component}")

    def added(self, component: str) -> None:
        self.judge.counts["planner added"] += 1
        self.on_order("add")
        counts = self.supervisor.counts()
        own = counts[component].starting + counts[component].ready
        options, role = self.scenario.options, _role(component)
        present = sum(each.present for each in counts.values())
        if own > (most := bounds(options, role)[1]):
            self._violate(f"{own} {component} were started, and {most} are the most")
        if present > options.budget_devices:
            self._violate(
                f"{present} devices are occupied, and the budget is {options.budget_devices}"
            )
        if not self._settled():
            return
        records = [one.record for one in self._of(component)]
        wanted = [record.count for record in records if record.kind == "add"]
        if not wanted:
            self._violate(f"a {component} was added, and no record of an operation says so")
        elif own > max(wanted):
            self._violate(f"{own} {component} were started, and the operation wanted {wanted}")

    def removing(self, who: str, worker: Worker) -> None:
        self._may_order(who, f"the end of {worker.slot.name}")
        self.judge.counts["planner removed"] += 1
        self.on_order("remove")
        # A withdrawn start did not count for the minimum.
        if worker.phase == "ready":
            self._check_minimum(worker)
        if worker.lease_id:
            self._check_not_last(worker)
        if self._settled():
            named = [one.record.lease_id for one in self._of(worker.component)]
            if worker.lease_id not in named and 0 not in named:
                self._violate(
                    f"{worker.slot.name} is removed, and no record of an operation says so"
                )

    def _check_minimum(self, worker: Worker) -> None:
        counts = self.supervisor.counts()[worker.component]
        least = bounds(self.scenario.options, _role(worker.component))[0]
        own = counts.starting + counts.ready - 1
        if own < least:
            self._violate(f"{worker.slot.name} is removed, and {own} are fewer than {least}")

    def _check_not_last(self, worker: Worker) -> None:
        """Checks that another worker serves, or did when the planner looked."""
        now = self.judge.now()
        seen_s = self._lease_ttl_s + _ORDER_S
        for one in self.supervisor.workers:
            if one.component != worker.component or one is worker or one.phase != "ready":
                continue
            name = one.slot.name
            if name in self._world.ready or self._left_at.get(name, -1e9) > now - seen_s:
                return
        self._violate(f"{worker.slot.name} is removed, and it is the last one that serves")

    def killing(self, who: str, worker: Worker) -> None:
        self.judge.counts["planner killed"] += 1
        lease_id = worker.last_lease
        for one in (*self._of(worker.component), *self._lost):
            late = self.judge.now() - one.since >= one.record.within_s
            if one.record.lease_id == lease_id and late:
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
        return names.endpoint_key(NAMESPACE, *_DECODE, lease_id) in self._listed

    # Records

    def committed(self, events: list[Any]) -> None:
        """A revision of etcd."""
        prefix = names.planner_prefix(NAMESPACE)
        for event in events:
            key = event.kv.key.decode()
            value = event.kv.value if event.type == rpc.Event.PUT else None
            if key.startswith(names.endpoint_prefix(NAMESPACE, *_DECODE)):
                (self._listed.discard if value is None else self._listed.add)(key)
            if not key.startswith(prefix):
                continue
            if key == names.planner_leader_key(NAMESPACE):
                self._leads(value)
            elif key.startswith(names.planner_operations_prefix(NAMESPACE)):
                self._operation(key, value)
            elif key == names.planner_target_key(NAMESPACE):
                self._wanted(value)

    def wiped(self) -> None:
        """etcd has lost its data."""
        self.wiped_at = self.judge.now()
        self._listed.clear()
        self._leads(None)
        self._lost += self._under_way.values()
        self._under_way.clear()
        self._changes.clear()
        self._gave.clear()

    def _leads(self, value: bytes | None) -> None:
        if self.reigns and self.reigns[-1].until is None:
            self.reigns[-1].until = self.judge.now()
        if value is not None:
            self.reigns.append(Reign(decode_json(value, LeaderRecord).lease_id))
            self.judge.counts["planner elected"] += 1

    def _operation(self, key: str, value: bytes | None) -> None:
        if (record := self._stored(key, value)) is None:
            return
        if record.phase == "leaving":
            worker = self.supervisor.find(record.component, record.lease_id)
            self._check_minimum(worker)
            self._check_not_last(worker)
        self.on_step(record)

    # Operations: one at a time in each role, followed to its end

    def _stored(self, key: str, value: bytes | None) -> OperationRecord | None:
        """The record at this key has changed. Returns it if it has another phase than before."""
        now, before = self.judge.now(), self._under_way.get(key)
        if value is None:
            if self._under_way.pop(key, None) is not None and before is not None:
                self._check_over(before)
            return None
        record = decode_json(value, OperationRecord)
        if before is None:
            self._check_begins(record)
            self._under_way[key] = Tracked(record, since=now, entered=now)
        elif before.record.phase == record.phase:
            self._under_way[key] = Tracked(record, before.since, before.entered)
            return None
        else:
            self._check_followed(before.record, record)
            self._under_way[key] = Tracked(record, before.since, entered=now)
        self.judge.counts[f"planner {record.kind} {record.phase}"] += 1
        return record

    def _of(self, component: str) -> Iterator[Tracked]:
        return (one for one in self._under_way.values() if one.record.component == component)

    def _wanted(self, value: bytes | None) -> None:
        """The record of the wanted numbers has changed. Each change is in it before its order."""
        target = None if value is None else decode_json(value, TargetRecord)
        for component, change in ({} if target is None else target.changes).items():
            before = self._changes.get(component)
            if before is not None and before[0] == change:
                continue
            self._changes[component] = change, self.judge.now()
            reason = "" if target is None else target.reason
            if before is not None and before[0].up is not change.up:
                self._check_reversal(component, change.up, reason, self.judge.now() - before[1])

    def _check_begins(self, record: OperationRecord) -> None:
        self.judge.counts[f"planner {record.kind}"] += 1
        if others := [one.record for one in self._of(record.component)]:
            self._violate(f"{record.component} has two operations: {record} and {others}")
        if record.kind == "remove":
            (self._gave.add if _ROOM.match(record.reason) else self._gave.discard)(record.component)
        elif others := self._gave - {record.component}:
            over = "pods" if self.scenario.pods else "a supervisor"
            self.judge.counts[f"planner moved a device over {over}"] += 1
            self._gave -= others

    def _check_reversal(self, component: str, up: bool, reason: str, passed_s: float) -> None:
        """passed_s: since its last change, which went the other way."""
        follows_load = any(kind.match(reason) for kind in ((_MORE,) if up else (_ENOUGH, _ROOM)))
        if follows_load and passed_s < self.scenario.options.cooldown_s:
            self._violate(f"a reversal after {passed_s:.3f} s: {component}, {reason}")

    def _check_followed(self, before: OperationRecord, after: OperationRecord) -> None:
        phases = _PHASES[after.kind]
        if phases.index(after.phase) < phases.index(before.phase):
            what = f"{after.kind} {after.component}"
            self._violate(f"{what} goes back from {before.phase} to {after.phase}")

    def _check_over(self, one: Tracked) -> None:
        """Checks that no worker still starts or drains that was ordered to: the planner has looked
        since. It does not wait for pods to end, and for no drain beyond its time."""
        record = one.record
        if record.phase != "asked":
            return
        age_s = self.judge.now() - START_S + EPOCH_S - record.at
        for worker in self.supervisor.workers:
            name = worker.slot.name
            if worker.component != record.component or worker.began > one.entered:
                continue
            if record.kind == "add" and worker.phase == "starting":
                self._violate(f"{name} still starts, and its record is deleted: {record}")
            removed = record.kind == "remove" and worker.last_lease == record.lease_id != 0
            late = self.scenario.pods or age_s >= record.within_s
            if removed and worker.phase == "draining" and not late:
                self._violate(f"{name} still drains, and its record is deleted: {record}")

    # Ends

    def left(self, name: str) -> None:
        """A worker's process has ended."""
        self._left_at[name] = self.judge.now()

    def unsettled(self) -> str | None:
        """What planners still have to do, as text; None if the numbers are those of an idle
        graph."""
        if self._under_way:
            return f"operations under way: {[one.record for one in self._under_way.values()]}"
        for role, component in COMPONENTS.items():
            counts = self.supervisor.counts()[component]
            least = bounds(self.scenario.options, role)[0]
            if (counts.starting, counts.ready, counts.draining) != (0, least, 0):
                return f"{component}: {counts}, and {least} would do"
        return None

    def _may_order(self, who: str, what: str) -> None:
        if self.scenario.is_dry(int(who.partition("-")[2])):
            self._violate(f"{who} orders {what}, and it is in a dry run")
        host = self._world.slots[who].host
        if host is None:
            return
        recent = self.judge.now() - self._lease_ttl_s
        if not any(
            reign.lease_id == host.lease.id and (reign.until is None or reign.until >= recent)
            for reign in self.reigns
        ):
            self._violate(f"{who} orders {what}, and it does not lead")

    def _settled(self) -> bool:
        """Whether orders that come now were decided with what etcd has."""
        return self.judge.now() - self.wiped_at > _ORDER_S

    def _violate(self, text: str) -> None:
        self.judge.violate(f"planner: {text}")


def _role(component: str) -> Role:
    return next(role for role, name in COMPONENTS.items() if name == component)

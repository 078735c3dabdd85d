"""The invariants of the records of additions and removals, and of the numbers that are wanted."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dynamo_lite.policy.scaling.inputs import Role
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import Change, OperationRecord, TargetRecord
from dynamo_lite.services.planner.connector import COMPONENTS
from tests.simulation.graph_supervisor import SimSupervisor
from tests.simulation.loop.loop import EPOCH_S, START_S

#: Phases of one operation follow each other in this order.
_PHASES = {
    "add": ("ordered", "asked", "withdrawing"),
    "remove": ("ordered", "leaving", "asked"),
}
#: A planner that ticks sees each outage of NATS that lasts for two ticks and this time.
_SEEN_S = 1.5
#: The reasons of changes that follow the load.
_ENOUGH, _ROOM, _MORE = (
    re.compile(start) for start in (r"\d+ are enough", "makes room for", r"\d+ more")
)


@dataclass(frozen=True)
class Tracked:
    """An operation that is under way."""

    record: OperationRecord
    #: When its record was first stored, and when it was first stored with its present phase.
    since: float
    entered: float


@dataclass
class OperationJudge:
    """One operation at a time in each role, followed to its end. None is decided for a load that
    is unknown, or soon after one in the other direction."""

    violate: Callable[[str], None]
    counts: Counter[str]
    #: Virtual time.
    now: Callable[[], float]
    options: PlannerOptions
    supervisor: SimSupervisor
    #: Whether the workers are pods.
    pods: bool
    #: In etcd now, by key.
    _under_way: dict[str, Tracked] = field(default_factory=dict[str, Tracked])
    #: The last change of each component, and when it was stored.
    _changes: dict[str, tuple[Change, float]] = field(
        default_factory=dict[str, tuple[Change, float]]
    )
    #: Components whose last removal has made room for another one.
    _gave: set[str] = field(default_factory=set[str])
    #: Of the broker: beginnings and ends.
    outages: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def stored(self, key: str, value: bytes | None) -> OperationRecord | None:
        """The record at this key has changed. Returns it if it has another phase than before."""
        now, before = self.now(), self._under_way.get(key)
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
        self.counts[f"planner {record.kind} {record.phase}"] += 1
        return record

    def of(self, component: str) -> Iterator[Tracked]:
        return (one for one in self._under_way.values() if one.record.component == component)

    def wanted(self, value: bytes | None) -> None:
        """The record of the wanted numbers has changed. Each change is in it before its order."""
        target = None if value is None else decode_json(value, TargetRecord)
        for component, change in ({} if target is None else target.changes).items():
            before = self._changes.get(component)
            if before is not None and before[0] == change:
                continue
            self._changes[component] = change, self.now()
            reason = "" if target is None else target.reason
            if before is not None and before[0].up is not change.up:
                self._check_reversal(component, change.up, reason, self.now() - before[1])

    def wiped(self) -> None:
        self._under_way.clear()
        self._changes.clear()
        self._gave.clear()

    def unsettled(self) -> str | None:
        if not self._under_way:
            return None
        return f"operations under way: {[one.record for one in self._under_way.values()]}"

    def _check_begins(self, record: OperationRecord) -> None:
        self.counts[f"planner {record.kind}"] += 1
        if others := [one.record for one in self.of(record.component)]:
            self.violate(f"{record.component} has two operations: {record} and {others}")
        self._check_known(record)
        if record.kind == "remove":
            (self._gave.add if _ROOM.match(record.reason) else self._gave.discard)(record.component)
        elif others := self._gave - {record.component}:
            over = "pods" if self.pods else "a supervisor"
            self.counts[f"planner moved a device over {over}"] += 1
            self._gave -= others

    def _check_known(self, record: OperationRecord) -> None:
        """Checks that no prefill worker was removed while the load was unknown: each outage that
        a planner sees restarts the window. The load of decode workers is in their /health, too, so
        it is known without NATS."""
        if record.kind != "remove" or record.component != COMPONENTS[Role.PREFILL]:
            return
        if not _ENOUGH.match(record.reason):
            return
        now, window_s = self.now(), self.options.down_window_s
        seen_s = 2 * self.options.tick_s + _SEEN_S
        for began, ended in self.outages:
            if min(ended, now) - max(began, now - window_s) > seen_s:
                self.violate(f"a removal was decided without NATS: {record.reason}")

    def _check_reversal(self, component: str, up: bool, reason: str, passed_s: float) -> None:
        """passed_s: since its last change, which went the other way."""
        follows_load = any(kind.match(reason) for kind in ((_MORE,) if up else (_ENOUGH, _ROOM)))
        if follows_load and passed_s < self.options.cooldown_s:
            self.violate(f"a reversal after {passed_s:.3f} s: {component}, {reason}")

    def _check_followed(self, before: OperationRecord, after: OperationRecord) -> None:
        phases = _PHASES[after.kind]
        if phases.index(after.phase) < phases.index(before.phase):
            what = f"{after.kind} {after.component}"
            self.violate(f"{what} goes back from {before.phase} to {after.phase}")

    def _check_over(self, one: Tracked) -> None:
        """Checks that no worker still starts or drains that was ordered to: the planner has looked
        since. It does not wait for pods to end, and for no drain beyond its time."""
        record = one.record
        if record.phase != "asked":
            return
        age_s = self.now() - START_S + EPOCH_S - record.at
        for worker in self.supervisor.workers:
            name = worker.slot.name
            if worker.component != record.component or worker.began > one.entered:
                continue
            if record.kind == "add" and worker.phase == "starting":
                self.violate(f"{name} still starts, and its record is deleted: {record}")
            removed = record.kind == "remove" and worker.last_lease == record.lease_id != 0
            late = self.pods or age_s >= record.within_s
            if removed and worker.phase == "draining" and not late:
                self.violate(f"{name} still drains, and its record is deleted: {record}")

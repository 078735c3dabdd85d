"""What `scripts/planner_check` sees of a graph, and what is wrong with it: no processes, no I/O."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.planner import LeaderRecord, OperationRecord
from dynamo_lite.runtime.sealed_records import UNSEALED
from dynamo_lite.runtime.store import Delete, Put, Snapshot, WatchEvent
from dynamo_lite.serve.run_state import ProcessState
from tests.chaos.cluster import DECODE, PREFILL
from tests.chaos.load import Tally

PLANNER = "Planner"
ROLES = (DECODE, PREFILL)
#: Workers of each role.
FEWEST, MOST = 1, 2
#: While no change is under way.
IDLE = "nothing under way"
#: The phases that every run comes through. A start that takes too long has more of them.
PHASES = (
    *(
        f"{kind} {role}: {phase}"
        for kind in ("add", "remove")
        for role in ROLES
        for phase in ("ordered", "asked")
    ),
    IDLE,
)
FEWEST_KILLS = 4
_ERRORS_SHOWN = 10
_GONE = ("stopped", "failed")


class Plan:
    """The planner's records in etcd, as a watch of `names.planner_prefix` tells them."""

    def __init__(self, namespace: str):
        self._leader_key = names.planner_leader_key(namespace)
        self._operations = names.planner_operations_prefix(namespace)
        self._entries: dict[str, bytes] = {}

    def apply(self, event: WatchEvent) -> None:
        match event:
            case Snapshot(entries=entries):
                self._entries = dict(entries)
            case Put(key=key, value=value):
                self._entries[key] = value
            case Delete(key=key):
                self._entries.pop(key, None)

    @property
    def leader_pid(self) -> int:
        """0 without a leader."""
        data = self._entries.get(self._leader_key)
        return decode_json(data, LeaderRecord).pid if data is not None else 0

    @property
    def phases(self) -> list[str]:
        """Of the changes that are under way, oldest first."""
        found = [
            decode_json(UNSEALED.opened(key, data), OperationRecord)
            for key, data in self._entries.items()
            if key.startswith(self._operations)
        ]
        found.sort(key=lambda operation: operation.id)
        return [f"{one.kind} {one.component}: {one.phase}" for one in found]


def due(phases: Iterable[str], struck: Collection[str], *, idle: bool) -> str:
    """The phase in which the planner is to be killed now, or "".

    phases: those under way. struck: those in which it was killed. idle: it may be killed while
    nothing is under way.
    """
    now = list(phases) or ([IDLE] if idle else [])
    return next((phase for phase in now if phase not in struck), "")


@dataclass
class Sight:
    """What has happened to the workers and to the planner.

    kills: of the planner, by phase. fewest, most: ready workers by role. present: most workers by
    role that were not leaving. at_end: ready workers by role. restarts: by process. failed: workers
    that could not be started. said: what the supervisor said of processes that it had to kill.
    errors: lines of the logs. trouble: what was not reached in time or did not end as it should.
    """

    tally: Tally = field(default_factory=Tally)
    kills: Counter[str] = field(default_factory=Counter[str])
    fewest: dict[str, int] = field(default_factory=dict[str, int])
    most: dict[str, int] = field(default_factory=dict[str, int])
    present: dict[str, int] = field(default_factory=dict[str, int])
    at_end: dict[str, int] = field(default_factory=dict[str, int])
    restarts: Counter[str] = field(default_factory=Counter[str])
    failed: list[str] = field(default_factory=list[str])
    said: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])
    trouble: list[str] = field(default_factory=list[str])
    #: The restarts of each process as last seen. A worker that gets the number of one that is gone
    #: begins again at 0.
    _seen: dict[str, int] = field(default_factory=dict[str, int])

    def see(self, processes: Collection[ProcessState]) -> None:
        """processes: of a graph that was ready."""
        for role in ROLES:
            states = [p.state for p in processes if p.service == role]
            ready = states.count("ready")
            present = sum(state not in (*_GONE, "draining") for state in states)
            self.fewest[role] = min(self.fewest.get(role, ready), ready)
            self.most[role] = max(self.most.get(role, 0), ready)
            self.present[role] = max(self.present.get(role, 0), present)
            self.at_end[role] = ready
        for process in processes:
            name, restarts = f"{process.service}-{process.instance}", process.restarts
            before = self._seen.get(name, 0)
            self.restarts[name] += restarts - before if restarts >= before else restarts
            self._seen[name] = restarts
            if process.state == "failed" and name not in self.failed:
                self.failed.append(name)

    def note_errors(self, lines: Iterable[str]) -> None:
        """lines: of the logs, as far as they are there: the log of a worker is emptied when another
        gets its number."""
        self.errors += [line for line in dict.fromkeys(lines) if line not in self.errors]

    @property
    def grown(self) -> bool:
        """Whether each role has had more than its minimum."""
        return all(self.most.get(role, 0) > FEWEST for role in ROLES)

    def missed(self) -> list[str]:
        """The phases that the planner was not killed in."""
        return [phase for phase in PHASES if not self.kills[phase]]

    def violations(self) -> list[str]:
        return [
            *self._of_requests(),
            *(line for role in ROLES for line in self._of_role(role)),
            *self._of_processes(),
            *self.trouble,
        ]

    def _of_requests(self) -> list[str]:
        tally = self.tally
        found = [f"lost requests: {n}, {kind}" for kind, n in tally.lost.items()]
        if tally.wrong:
            found.append(f"wrong answers: {tally.wrong}")
        if tally.open:
            found.append(f"requests that have not ended: {tally.open}")
        if not tally.right:
            found.append("no request has had its answer")
        return found

    def _of_role(self, role: str) -> list[str]:
        if role not in self.at_end:
            return [f"{role}: no worker was seen"]
        found: list[str] = []
        if self.fewest[role] < FEWEST:
            found.append(f"{role}: only {self.fewest[role]} ready, the minimum is {FEWEST}")
        if self.most[role] <= FEWEST:
            found.append(f"{role}: did not grow, at most {self.most[role]} ready")
        if self.present[role] > MOST:
            found.append(f"{role}: {self.present[role]} at a time, the maximum is {MOST}")
        if self.at_end[role] != FEWEST:
            found.append(f"{role}: {self.at_end[role]} ready at the end instead of {FEWEST}")
        return found

    def _of_processes(self) -> list[str]:
        found = [f"{name}: could not be started" for name in self.failed]
        for name, restarts in self.restarts.items():
            killed = self.kills.total() if name.startswith(PLANNER) else 0
            if restarts != killed:
                found.append(f"{name}: restarted {restarts} times, killed here {killed} times")
        if self.kills.total() < FEWEST_KILLS:
            found.append(f"planner: killed {self.kills.total()} times, fewer than {FEWEST_KILLS}")
        found += [f"the supervisor had to kill: {line}" for line in self.said]
        if self.errors:
            found.append(f"errors in the logs: {len(self.errors)}")
            found += [f"  {line}" for line in self.errors[:_ERRORS_SHOWN]]
        return found

    def report(self) -> str:
        tally = self.tally
        lines = [
            f"requests: {tally.right} right, {tally.wrong} wrong, {tally.lost.total()} lost;"
            f" refused and asked again: {tally.refused.total()}",
            *(
                f"{role}: ready at least {self.fewest[role]}, at most {self.most[role]},"
                f" at the end {self.at_end[role]}"
                for role in ROLES
                if role in self.at_end
            ),
            f"planner: killed {self.kills.total()} times",
            *(f"{n:>4}  {phase}" for phase, n in self.kills.items()),
            *(f"   -  {phase}: not hit" for phase in self.missed()),
        ]
        return "\n".join([*lines, *tally.examples])

"""The shipped planner on the simulated graph.

The decisions are those of `policy/scaling/planner.py`, the loads those of `observed.py` there. They
are those of the tick's moment; in a graph they are up to a second older.
"""

from collections import deque
from dataclasses import dataclass, field

from benchmarks.capacity.decode import DecodeWorkerModel
from benchmarks.capacity.fleet import RoleFleet, WorkerCounts
from benchmarks.capacity.graph import GraphModel
from benchmarks.capacity.histogram import Histogram
from benchmarks.capacity.prefill import PrefillWorkerModel
from dynamo_lite.policy.decision.backlog import BacklogTotals
from dynamo_lite.policy.scaling.inputs import LastChange, Operation, Role, RoleSeen, Seen
from dynamo_lite.policy.scaling.memory import AddWorkers, PlannerMemory, RemoveWorker
from dynamo_lite.policy.scaling.observed import DemandRates, TokenRates, decode_load
from dynamo_lite.policy.scaling.planner import begun, plan
from dynamo_lite.policy.scaling.start_times import StartTimes
from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import RoleCounts

#: Window of rates.
_RATE_S = 10.0


Fleet = RoleFleet[PrefillWorkerModel] | RoleFleet[DecodeWorkerModel]


@dataclass
class _Starts:
    """The starts of one role."""

    times: StartTimes = field(default_factory=StartTimes)
    #: When those under way were ordered.
    ordered_at: float | None = None
    done: int = 0
    failed: int = 0
    #: The last change of the number: whether it was up, and when.
    changed: tuple[bool, float] | None = None


class PlannerScaler:
    """limits: the planner's options."""

    def __init__(self, limits: PlannerOptions):
        self.tick_s, self._limits = limits.tick_s, limits
        self._memory = PlannerMemory()
        self._demand = DemandRates()
        self._starts = {role: _Starts() for role in Role}
        #: (time, tokens of then, requests that had got memory by then)
        self._past = deque([(0.0, Histogram(), 0)])

    def tick(self, graph: GraphModel, now: float) -> WorkerCounts:
        fleets: dict[Role, Fleet] = {Role.PREFILL: graph.prefill, Role.DECODE: graph.decode}
        seen = self._seen(graph, fleets, now)
        self._memory, proposal = plan(self._memory, seen, self._limits, now)
        wanted = {role: fleet.count for role, fleet in fleets.items()}
        for action in proposal.actions:
            starts = self._starts[action.role]
            if isinstance(action, AddWorkers):
                wanted[action.role] += action.size
                starts.ordered_at = now
                starts.changed = True, now
            elif isinstance(action, RemoveWorker):
                wanted[action.role] -= 1
                starts.changed = False, now
            else:
                wanted[action.role] = len(fleets[action.role].ready)
                self._ended(starts, now, failed=True)
            self._memory = begun(self._memory, action)
        return WorkerCounts(wanted[Role.PREFILL], wanted[Role.DECODE])

    def _seen(self, graph: GraphModel, fleets: dict[Role, Fleet], now: float) -> Seen:
        totals = BacklogTotals(
            graph.queue.jobs,
            {Lane.LONG: graph.queue.tokens},
            asked_tokens=graph.tally.asked_tokens,
            overflow_tokens=graph.tally.refused_tokens,
        )
        present = sum(fleet.devices for fleet in fleets.values())
        free = max(self._limits.budget_devices - present, 0)
        decode = decode_load(graph.decode.ready, totals, self._rates(graph, now))
        return Seen(
            roles={role: self._role(role, fleet, free, now) for role, fleet in fleets.items()},
            prefill=self._demand.load(totals, graph.queue.tokens_per_s, now, complete=True),
            decode=decode,
        )

    def _rates(self, graph: GraphModel, now: float) -> TokenRates:
        tally, past = graph.tally, self._past
        while len(past) > 1 and past[0][0] < now - _RATE_S - 1e-6:
            past.popleft()
        began, gaps, admitted = past[0]
        seconds, recent = now - began, tally.gaps.since(gaps)
        rates = TokenRates(
            admitted_per_s=(tally.admitted - admitted) / seconds if seconds else None,
            tokens_per_s=recent.weight / seconds if seconds else None,
            token_s=recent.mean_s,
        )
        past.append((now, tally.gaps.copy(), tally.admitted))
        return rates

    def _role(self, role: Role, fleet: Fleet, free: int, now: float) -> RoleSeen:
        starts, starting, draining = self._starts[role], fleet.starting_s, fleet.draining_s
        changed = starts.changed
        if starts.ordered_at is not None and not starting:
            self._ended(starts, now, failed=False)
        operations = [
            Operation(id=number, kind="remove", age_s=age_s)
            for number, age_s in enumerate(draining, 1)
        ]
        if starts.ordered_at is not None:
            operations.append(Operation(id=0, kind="add", age_s=now - starts.ordered_at))
        return RoleSeen(
            counts=RoleCounts(
                starting=len(starting),
                ready=len(fleet.ready),
                draining=len(draining),
                devices_each=1,
                devices_free=free,
            ),
            operations=tuple(operations),
            start_s=starts.times.median,
            start_p95_s=starts.times.p95,
            youngest_s=fleet.youngest_s,
            starts_done=starts.done,
            starts_failed=starts.failed,
            changed=changed and LastChange(up=changed[0], age_s=now - changed[1]),
        )

    def _ended(self, starts: _Starts, now: float, *, failed: bool) -> None:
        if starts.ordered_at is not None:
            starts.times.add(now - starts.ordered_at)
        starts.ordered_at = None
        if failed:
            starts.failed += 1
        else:
            starts.done += 1

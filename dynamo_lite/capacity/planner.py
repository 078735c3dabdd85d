"""The shipped planner as a scaler of the simulated graph.

The decisions are those of `policy/scaling/planner.py`, the loads those of `observed.py` there. The
times of starts are known to the tick, as in a graph.
"""

from dataclasses import dataclass, field, replace

from dynamo_lite.capacity.options import WorkerCounts
from dynamo_lite.capacity.scaling import RoleWorkers, ScalerInputs, ScalerProposal
from dynamo_lite.policy.decision.backlog import BacklogTotals
from dynamo_lite.policy.scaling.inputs import DecodeLoad, Operation, Role, RoleSeen, Seen
from dynamo_lite.policy.scaling.memory import AddWorkers, PlannerMemory, RemoveWorker
from dynamo_lite.policy.scaling.observed import DemandRates, TokenRates, decode_load
from dynamo_lite.policy.scaling.planner import begun, plan
from dynamo_lite.policy.scaling.start_times import StartTimes
from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import RoleCounts


@dataclass
class _Starts:
    """The starts of one role."""

    times: StartTimes = field(default_factory=StartTimes)
    #: The order that is under way.
    id: int | None = None
    ordered_at: float = 0.0
    done: int = 0
    failed: int = 0


class PlannerScaler:
    """has_prefill: whether the graph has prefill workers."""

    def __init__(self, limits: PlannerOptions, *, has_prefill: bool, name: str = "planner"):
        self.name, self.tick_s = name, limits.tick_s
        self._limits = limits
        self._memory = PlannerMemory()
        self._demand = DemandRates()
        self._asked = self._refused = self._orders = 0
        roles = tuple(Role) if has_prefill else (Role.DECODE,)
        self._starts = {role: _Starts() for role in roles}

    def tick(self, seen: ScalerInputs, now: float) -> ScalerProposal:
        inputs = self._inputs(seen, now)
        self._memory, proposal = plan(self._memory, inputs, self._limits, now)
        wanted = {Role.PREFILL: seen.prefill.count, Role.DECODE: seen.decode.count}
        for action in proposal.actions:
            starts = self._starts[action.role]
            if isinstance(action, AddWorkers):
                wanted[action.role] += action.size
                self._orders += 1
                starts.id, starts.ordered_at = self._orders, now
            elif isinstance(action, RemoveWorker):
                wanted[action.role] -= 1
            else:
                wanted[action.role] = _of(seen, action.role).ready
                self._ended(starts, now, failed=True)
            self._memory = begun(self._memory, action, now)
        return ScalerProposal(
            WorkerCounts(wanted[Role.PREFILL], wanted[Role.DECODE]), proposal.reason
        )

    def _inputs(self, seen: ScalerInputs, now: float) -> Seen:
        self._asked += seen.asked_tokens
        self._refused += seen.refused_tokens
        totals = BacklogTotals(
            seen.backlog_jobs,
            {Lane.LONG: seen.backlog_tokens},
            asked_tokens=self._asked,
            overflow_tokens=self._refused,
        )
        present = sum(_present(_of(seen, role)) for role in self._starts)
        free = max(self._limits.budget_devices - present, 0)
        rates = TokenRates(
            admitted_per_s=seen.admitted_per_s,
            tokens_per_s=seen.tokens_per_s,
            token_s=seen.token_s,
            itl_s=seen.itl_s,
        )
        decode = decode_load(seen.decode_workers, totals, rates)
        return Seen(
            roles={role: self._role(role, _of(seen, role), free, now) for role in self._starts},
            prefill=self._demand.load(totals, seen.prefill_tokens_per_s, now, complete=True),
            decode=_with_limit(decode, self._limits),
        )

    def _role(self, role: Role, seen: RoleWorkers, free: int, now: float) -> RoleSeen:
        starts = self._starts[role]
        if starts.id is not None and not seen.starting_ages_s:
            self._ended(starts, now, failed=False)
        operations = [
            Operation(id=-1 - number, kind="remove", age_s=age_s)
            for number, age_s in enumerate(seen.draining_ages_s)
        ]
        if starts.id is not None:
            age_s = now - starts.ordered_at
            operations.append(Operation(id=starts.id, kind="add", age_s=age_s))
        return RoleSeen(
            counts=RoleCounts(
                starting=len(seen.starting_ages_s),
                ready=seen.ready,
                draining=len(seen.draining_ages_s),
                devices_each=1,
                devices_free=free,
            ),
            operations=tuple(operations),
            start_s=starts.times.median,
            start_p95_s=starts.times.p95,
            youngest_s=seen.youngest_s,
            starts_done=starts.done,
            starts_failed=starts.failed,
        )

    def _ended(self, starts: _Starts, now: float, *, failed: bool) -> None:
        starts.times.add(now - starts.ordered_at)
        starts.id = None
        if failed:
            starts.failed += 1
        else:
            starts.done += 1


def _of(seen: ScalerInputs, role: Role) -> RoleWorkers:
    return seen.prefill if role == Role.PREFILL else seen.decode


def _present(seen: RoleWorkers) -> int:
    return seen.count + len(seen.draining_ages_s)


def _with_limit(load: DecodeLoad, limits: PlannerOptions) -> DecodeLoad:
    """Adds the limit, as the service does. It is an option, because no worker reports its own
    limit."""
    return replace(load, max_num_seqs=limits.decode_max_num_seqs or None)

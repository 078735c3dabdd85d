"""The shipped planner on the simulated graph.

The decisions are those of `planner/policy/planner.py`, the loads those of `planner/observation.py`.
They are those of the tick's moment; in a graph they are up to a second older.
"""

from collections import deque
from dataclasses import dataclass, replace

from benchmarks.capacity.decode import DecodeWorkerModel
from benchmarks.capacity.fleet import RoleFleet, WorkerCounts
from benchmarks.capacity.graph import GraphModel
from benchmarks.capacity.histogram import Histogram
from benchmarks.capacity.prefill import PrefillWorkerModel
from dynamo_lite.planner.observation import decode_load
from dynamo_lite.planner.policy.inputs import (
    DecodeLoad,
    PrefillLoad,
    Role,
    RoleSeen,
    Seen,
)
from dynamo_lite.planner.policy.planner import PlannerMemory, begun, plan
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import RoleCounts
from dynamo_lite.runtime.overview.model import LiveProcess

#: Window of rates, as in `runtime/overview/compose.py`.
_RATE_S = 10.0
#: Windows of the demand for prefill workers and of their rate, as in `planner/observation.py`.
_DEMAND_S, _PREFILL_S = 15.0, 60.0

Fleet = RoleFleet[PrefillWorkerModel] | RoleFleet[DecodeWorkerModel]


@dataclass(frozen=True)
class _Past:
    """What had been counted at a tick."""

    at: float
    gaps: Histogram
    admitted: int
    asked_tokens: int
    refused_tokens: int
    written_tokens: int
    busy_s: float


class PlannerScaler:
    """limits: the planner's options."""

    def __init__(self, limits: PlannerOptions):
        self.tick_s, self._limits = limits.tick_s, limits
        self._memory = PlannerMemory()
        #: The last change of each role: whether it was up, and when. No start fails.
        self._changed: dict[Role, tuple[bool, float]] = {}
        self._past = deque([_Past(0.0, Histogram(), 0, 0, 0, 0, 0.0)])

    def tick(self, graph: GraphModel, now: float) -> WorkerCounts:
        fleets: dict[Role, Fleet] = {Role.PREFILL: graph.prefill, Role.DECODE: graph.decode}
        seen = self._seen(graph, fleets, now)
        self._memory, proposal = plan(self._memory, seen, self._limits, now)
        wanted = {role: fleet.count for role, fleet in fleets.items()}
        for change in proposal.actions:
            wanted[change.role] += change.by
            self._changed[change.role] = change.by > 0, now
            self._memory = begun(self._memory, change)
        return WorkerCounts(wanted[Role.PREFILL], wanted[Role.DECODE])

    def _seen(self, graph: GraphModel, fleets: dict[Role, Fleet], now: float) -> Seen:
        present = sum(fleet.devices for fleet in fleets.values())
        free = max(self._limits.budget_devices - present, 0)
        prefill = self._prefill(graph, now)
        decode = self._decode(graph, now)
        self._remember(graph, now)
        return Seen(
            roles={role: self._role(role, fleet, free) for role, fleet in fleets.items()},
            prefill=prefill,
            decode=decode,
        )

    def _prefill(self, graph: GraphModel, now: float) -> PrefillLoad:
        tally, then, longer = graph.tally, self._since(_DEMAND_S, now), self._since(_PREFILL_S, now)
        written, busy_s = tally.written_tokens - longer.written_tokens, tally.busy_s - longer.busy_s
        backlog = graph.queue.tokens
        rate = written / busy_s if written else None
        if now <= then.at:
            return PrefillLoad(backlog=backlog, rate=rate)
        return PrefillLoad(
            asked_per_s=((tally.asked_tokens - then.asked_tokens) / (now - then.at)),
            refused_per_s=((tally.refused_tokens - then.refused_tokens) / (now - then.at)),
            backlog=backlog,
            rate=rate,
        )

    def _decode(self, graph: GraphModel, now: float) -> DecodeLoad:
        tally, then = graph.tally, self._since(_RATE_S, now)
        seconds, recent = now - then.at, tally.gaps.since(then.gaps)
        return replace(
            decode_load([_reported(worker) for worker in graph.decode.ready], graph.queue.jobs),
            admitted_per_s=(tally.admitted - then.admitted) / seconds if seconds else None,
            tokens_per_s=recent.weight / seconds if seconds else None,
            token_s=recent.mean_s,
        )

    def _since(self, seconds: float, now: float) -> _Past:
        """The first tick in this time, or the last one before it."""
        return next((one for one in self._past if one.at >= now - seconds - 1e-6), self._past[-1])

    def _remember(self, graph: GraphModel, now: float) -> None:
        tally, past = graph.tally, self._past
        counts = tally.asked_tokens, tally.refused_tokens, tally.written_tokens, tally.busy_s
        past.append(_Past(now, tally.gaps.copy(), tally.admitted, *counts))
        while past[0].at < now - _PREFILL_S:
            past.popleft()

    def _role(self, role: Role, fleet: Fleet, free: int) -> RoleSeen:
        return RoleSeen(
            counts=RoleCounts(
                starting=len(fleet.starting_s),
                ready=len(fleet.ready),
                draining=len(fleet.draining_s),
                devices_each=1,
                devices_free=free,
            ),
            changed=self._changed.get(role),
        )


def _reported(worker: DecodeWorkerModel) -> LiveProcess:
    return LiveProcess(
        component="VllmWorker",
        instance=None,
        lease="",
        state="ready",
        running=worker.running,
        waiting=worker.waiting,
        kv_usage=worker.kv_usage,
        max_running=worker.max_running,
    )

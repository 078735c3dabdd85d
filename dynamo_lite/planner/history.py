"""What a planner has decided lately, and its metrics."""

from collections import Counter as Tally
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo_lite.planner.connector import COMPONENTS
from dynamo_lite.planner.policy.memory import (
    Action,
    AddWorkers,
    Proposal,
    RemoveWorker,
    WithdrawStart,
)
from dynamo_lite.protocol.planner import PlannerDecision, RoleDecision

_MOST = 500
_KINDS: Mapping[type[Action], str] = {
    AddWorkers: "add",
    RemoveWorker: "remove",
    WithdrawStart: "withdraw",
}


def as_text(action: Action) -> str:
    """An action in words."""
    component = COMPONENTS[action.role]
    if isinstance(action, AddWorkers):
        return f"{component} +{action.size}: {action.reason}"
    if isinstance(action, WithdrawStart):
        return f"{component} start withdrawn: {action.reason}"
    which = "a starting one" if action.starting else "one"
    return f"{component} -1 ({which}): {action.reason}"


def roles_of(proposal: Proposal) -> list[RoleDecision]:
    return [
        RoleDecision(
            component=COMPONENTS[role],
            state=one.state,
            count=one.count,
            wanted=one.wanted,
            reason=one.reason[:1024],
        )
        for role, one in proposal.roles.items()
    ]


@dataclass(frozen=True)
class _Past:
    at: float
    decision: PlannerDecision
    #: What makes it differ from the one before.
    key: tuple[object, ...]


class History:
    """The last decisions. Those that repeat the one before are left out."""

    def __init__(self) -> None:
        self._past: deque[_Past] = deque(maxlen=_MOST)

    def add(self, proposal: Proposal, now: float) -> bool:
        """Returns whether it differs from the last one."""
        roles = roles_of(proposal)
        actions = [as_text(action)[:1024] for action in (*proposal.actions, *proposal.held)]
        kinds = tuple(text.partition(":")[0] for text in actions)
        states = tuple((r.component, r.state, r.count, r.wanted) for r in roles)
        key = (proposal.hold, kinds, states)
        repeats = bool(self._past) and self._past[-1].key == key and not proposal.actions
        if not repeats:
            decision = PlannerDecision(age_s=0.0, hold=proposal.hold, actions=actions, roles=roles)
            self._past.append(_Past(now, decision, key))
        return not repeats

    def last(self, number: int, now: float) -> list[PlannerDecision]:
        """Oldest first."""
        return [
            PlannerDecision(
                age_s=now - past.at,
                hold=past.decision.hold,
                actions=past.decision.actions,
                roles=past.decision.roles,
            )
            for past in list(self._past)[-number:]
        ]


class PlannerMetrics:
    def __init__(self, registry: CollectorRegistry):
        self.leads = Gauge(
            "dynamo_lite_planner_leads", "1 while this planner may act", registry=registry
        )
        self._workers = Gauge(
            "dynamo_lite_planner_workers",
            "Workers of each component: count (serving or starting) and wanted",
            ["component", "kind"],
            registry=registry,
        )
        self._actions = Counter(
            "dynamo_lite_planner_actions",
            "Changes that were decided: add, remove, withdraw; in a dry run, too",
            ["component", "action", "held"],
            registry=registry,
        )
        self._operations = Counter(
            "dynamo_lite_planner_operations",
            "Changes that have ended, by outcome: done, failed, withdrawn, refused, late",
            ["component", "kind", "outcome"],
            registry=registry,
        )
        self.failures = Counter(
            "dynamo_lite_planner_failures",
            "Ticks in which something could not be asked or ordered, by what: counts, store",
            ["what"],
            registry=registry,
        )
        self._ended: Tally[tuple[str, str, str]] = Tally()

    def decided(self, proposal: Proposal) -> None:
        for role in roles_of(proposal):
            self._workers.labels(role.component, "count").set(role.count)
            wanted = float("nan") if role.wanted is None else role.wanted
            self._workers.labels(role.component, "wanted").set(wanted)
        for held, actions in (("no", proposal.actions), ("yes", proposal.held)):
            for action in actions:
                self._actions.labels(COMPONENTS[action.role], _KINDS[type(action)], held).inc()

    def ended(self, tally: Tally[tuple[str, str, str]]) -> None:
        """tally: of all operations that have ended since the start."""
        for key, number in tally.items():
            if number > self._ended[key]:
                self._operations.labels(*key).inc(number - self._ended[key])
        self._ended = Tally(tally)

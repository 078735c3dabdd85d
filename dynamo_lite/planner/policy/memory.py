"""What the planner remembers from tick to tick, and what it proposes. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.work import Work

#: hold: nothing may be done. observe: the number fits. pending: another number is wanted, and has
#: to be wanted for a while. acting: an order is not confirmed yet. settling: it is confirmed, and
#: the workers are not ready or gone yet.
PlanState = Literal["hold", "observe", "pending", "acting", "settling"]


@dataclass(frozen=True, kw_only=True)
class AddWorkers:
    """Start `size` workers."""

    role: Role
    size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RemoveWorker:
    """Remove one worker."""

    role: Role
    #: A worker that was never ready, instead of a serving one.
    starting: bool
    reason: str
    #: Of a starting one: it takes longer than a start may, and the planner does not wait for it.
    overdue: bool = False


@dataclass(frozen=True, kw_only=True)
class WithdrawStart:
    """Cancel a start that takes too long."""

    role: Role
    #: `Operation.id`
    operation: int
    reason: str


Action = AddWorkers | RemoveWorker | WithdrawStart


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """One role in a proposal."""

    state: PlanState
    #: Workers that serve or will serve.
    count: int
    #: Within minimum and maximum; None: not known.
    wanted: int | None
    #: Why that many are wanted, and why nothing is done if nothing is.
    reason: str


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The result of one tick."""

    actions: tuple[Action, ...] = ()
    #: What would be done if nothing held it back; only while `hold` is set.
    held: tuple[Action, ...] = ()
    #: Why nothing may be done; empty if it may.
    hold: str = ""
    roles: Mapping[Role, RolePlan] = field(default_factory=dict[Role, RolePlan])

    @property
    def reason(self) -> str:
        """In one line."""
        if self.hold:
            return f"hold: {self.hold}"
        if self.actions:
            return "; ".join(action.reason for action in self.actions)
        return "; ".join(f"{role.value}: {plan.reason}" for role, plan in self.roles.items())


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """One role. All times are monotonic seconds."""

    #: The number at the last tick, and whether it was about to change then.
    count: int | None = None
    busy: bool = False
    #: Ticks in a row that wanted more workers.
    up_ticks: int = 0
    #: Since when the load is known without a gap; None: it is not.
    known_since: float | None = None
    #: (time, workers needed) of the down window: a later entry is always smaller, so the first one
    #: is the window's maximum.
    needs: tuple[tuple[float, int], ...] = ()
    #: Failed starts in a row, and when the next start may be tried.
    failures: int = 0
    retry_at: float = 0.0
    #: Since when a worker starts that no addition under way waits for; None: there is none.
    starting_since: float | None = None
    starts_done: int = 0
    starts_failed: int = 0


@dataclass(frozen=True, kw_only=True)
class PlannerMemory:
    """Begin with `PlannerMemory()`. A worker may be removed only after a whole down window."""

    #: Of the last tick.
    at: float | None = None
    roles: Mapping[Role, RoleMemory] = field(default_factory=dict[Role, RoleMemory])
    #: Tokens per second of one busy prefill worker, when it was last measured; None: never.
    prefill_rate: float | None = None
    #: What requests need.
    work: Work = field(default_factory=Work)

    def role(self, role: Role) -> RoleMemory:
        return self.roles.get(role) or RoleMemory()

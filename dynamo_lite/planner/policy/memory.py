"""What the planner remembers from tick to tick, and what it proposes. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.work import Work
from dynamo_lite.runtime.backoff import Backoff

_START_BACKOFF = Backoff(first_s=30.0, factor=2.0, longest_s=1800.0)

#: hold: nothing may be done. observe: the number fits. pending: another number is wanted, and has
#: to be wanted for a while. settling: workers start or drain.
PlanState = Literal["hold", "observe", "pending", "settling"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another number of workers of one role."""

    role: Role
    #: Workers more; below 0: workers less.
    by: int
    reason: str
    #: Those that start end, because they take too long. If not, one that serves is removed.
    withdraws: bool = False

    @property
    def kind(self) -> Literal["add", "remove", "withdraw"]:
        if self.by > 0:
            return "add"
        return "withdraw" if self.withdraws else "remove"


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

    actions: tuple[Change, ...] = ()
    #: What would be done if nothing held it back; only while `hold` is set.
    held: tuple[Change, ...] = ()
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
        return "; ".join(f"{role.word}: {plan.reason}" for role, plan in self.roles.items())


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """One role. All times are monotonic seconds."""

    #: The number after the last tick and its change.
    count: int | None = None
    #: Ticks in a row that wanted more workers.
    up_ticks: int = 0
    #: Since when the load is known without a gap; None: it is not.
    known_since: float | None = None
    #: (time, workers needed) of the down window: a later entry is always smaller, so the first one
    #: is the window's maximum.
    needs: tuple[tuple[float, int], ...] = ()
    #: Since when workers start; None: there are none. How many there are to be in the end.
    starting_since: float | None = None
    expected: int = 0
    #: Failed starts in a row, and when the next start may be tried.
    failures: int = 0
    retry_at: float = 0.0
    #: The last `RoleSeen.changed`, and when it was seen first: the clocks of two hosts differ.
    changed: tuple[bool, float] | None = None
    changed_at: float = 0.0

    def failed(self, now: float) -> "RoleMemory":
        """With one more failed start."""
        delay_s = _START_BACKOFF.after_exit(self.failures, 0.0).delay_s
        return replace(
            self, starting_since=None, failures=self.failures + 1, retry_at=now + delay_s
        )


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

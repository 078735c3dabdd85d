"""One role: what is remembered of it, and what it wants before the budget of all. Pure."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import structs

from dynamo_lite.planner.policy.inputs import Role, RoleSeen
from dynamo_lite.planner.policy.limits import bounds
from dynamo_lite.planner.policy.needs import Need
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import RoleCounts
from dynamo_lite.runtime.backoff import Backoff

#: Ticks in a row that must want more workers.
_UP_TICKS = 2
#: A step up is at most this share of the present number, or `_FREE_STEP`.
_UP_STEP, _FREE_STEP = 0.5, 4
_START_BACKOFF = Backoff(first_s=30.0, factor=2.0, longest_s=1800.0)

#: hold: the load is not known. observe: the number fits. pending: another number is wanted, and has
#: to be wanted for a while. settling: workers start or drain.
PlanState = Literal["hold", "observe", "pending", "settling"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another number of workers of one role."""

    role: Role
    #: withdraw: those that start end, because they take too long. remove: one that serves.
    kind: Literal["add", "remove", "withdraw"]
    #: Workers more; below 0: workers less.
    by: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """What one role wants, before the budget."""

    state: PlanState
    #: Workers that serve or will serve.
    count: int
    #: Within minimum and maximum, but for an operator's number that is reached; None: not known.
    wanted: int | None
    #: Why that many are wanted, and why nothing is done if nothing is.
    reason: str
    #: Workers to add.
    add: int = 0
    fewer: Change | None = None


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """All times are monotonic seconds."""

    #: The number after the last tick and its change.
    count: int | None = None
    #: Ticks in a row that wanted more workers.
    up_ticks: int = 0
    #: Since when the load is known without a gap; None: it is not.
    known_since: float | None = None
    #: (time, workers needed) of the down window: a later entry is always smaller, so the first one
    #: is the window's maximum.
    needs: tuple[tuple[float, int], ...] = ()
    #: Since when workers start; None: there are none.
    starting_since: float | None = None
    #: What was counted last, with the starts that were ordered since.
    counts: RoleCounts = field(default_factory=RoleCounts)
    #: Whether one of these starts has ended and no worker is ready for it.
    lost: bool = False
    #: Failed starts in a row, and when the next start may be tried.
    failures: int = 0
    retry_at: float = 0.0
    #: The last `RoleSeen.changed`, and when it was seen first: the clocks of two hosts differ.
    changed: tuple[bool, float] | None = None
    changed_at: float = 0.0

    def without_window(self) -> "RoleMemory":
        return replace(self, known_since=None, needs=(), up_ticks=0)

    def noted(self, seen: RoleSeen, need: Need, limits: PlannerOptions, now: float) -> "RoleMemory":
        """With this tick's number, need and starts."""
        # Another process may have changed the number.
        made = self if self.count in (None, seen.count) else self.without_window()
        if need.workers is None or not need.complete:
            made = replace(made, known_since=None, needs=())
        else:
            begin = now - limits.down_window_s
            kept = (one for one in made.needs if one[0] > begin and one[1] > need.workers)
            since = now if made.known_since is None else made.known_since
            made = replace(made, known_since=since, needs=(*kept, (now, need.workers)))
        if seen.changed != made.changed:
            made = replace(made, changed=seen.changed, changed_at=now)
        return replace(made._started(seen.counts, now), count=seen.count, counts=seen.counts)

    def _started(self, counts: RoleCounts, now: float) -> "RoleMemory":
        """With what has become of starts."""
        before = self.counts
        # Ready workers may be removed meanwhile.
        came = counts.ready - before.ready + max(counts.draining - before.draining, 0)
        lost = self.lost or before.starting - counts.starting > max(came, 0)
        if counts.starting:
            since = now if self.starting_since is None else self.starting_since
            return replace(self, starting_since=since, lost=lost)
        if self.starting_since is None:
            return replace(self, lost=False)
        if lost:
            return self._failed(now)
        return replace(self, starting_since=None, failures=0, retry_at=0.0)

    def _failed(self, now: float) -> "RoleMemory":
        """With one more failed start."""
        retry_at = now + _START_BACKOFF.after_exit(self.failures, 0.0).delay_s
        failures = self.failures + 1
        return replace(self, starting_since=None, lost=False, failures=failures, retry_at=retry_at)

    def begun(self, change: Change, now: float) -> "RoleMemory":
        made = replace(self, count=(self.count or 0) + change.by, up_ticks=0)
        if change.kind == "withdraw":
            return made._failed(now)
        if change.kind == "add":
            starting = self.counts.starting + change.by
            counts = structs.replace(self.counts, starting=starting)
            return replace(made, starting_since=now, counts=counts)
        return made


class RoleStep:
    """One tick of one role."""

    def __init__(
        self,
        role: Role,
        memory: RoleMemory,
        seen: RoleSeen,
        need: Need,
        limits: PlannerOptions,
        now: float,
    ):
        self._role, self._seen, self._need = role, seen, need
        self._limits, self._now = limits, now
        self._least, self._most = bounds(limits, role)
        #: After `plan` with this tick.
        self.memory = memory.noted(seen, need, limits, now)

    def plan(self, manual: int | None) -> RolePlan:
        """manual: the number that an operator has set, regardless of the load. If it is reached,
        nothing changes, whatever the limits say."""
        count = self._seen.count
        wanted = self._need.wanted(count) if manual is None else manual
        if wanted is not None and manual != count:
            wanted = min(max(wanted, self._least), self._most)
        goal = self._least if wanted is None else wanted
        ticks = self.memory.up_ticks + 1 if goal > count and manual is None else 0
        self.memory = replace(self.memory, up_ticks=ticks)
        if under_way := self._under_way(wanted, more=goal > count):
            return under_way
        if goal > count:
            return self._up(goal, manual)
        if manual is None:
            return self._down(wanted)
        reason = f"an operator has set {goal}"
        return self._fewer(goal, reason) if goal < count else self._plan("observe", goal, reason)

    def _up(self, goal: int, manual: int | None) -> RolePlan:
        count = self._seen.count
        missing = goal - count
        add = min(missing, max(_FREE_STEP, math.ceil(count * _UP_STEP)))
        reason, wait = f"{missing} more: {self._need.reason}", ""
        if manual is not None:
            add, reason = missing, f"an operator has set {goal}"
        elif count < self._least:
            add = min(self._least - count, add)
            reason = f"fewer than the minimum, {self._least}"
        elif self.memory.up_ticks < _UP_TICKS:
            wait = "needed once so far"
        else:
            wait = self._until_reversal(up=True)
        if wait := self._until_retry() or wait:
            return self._plan("pending", goal, f"{reason}; {wait}")
        return self._plan("pending", goal, reason, add=add)

    def _down(self, wanted: int | None) -> RolePlan:
        """The window's maximum counts, so one busy moment keeps a worker for a whole window."""
        count, memory, reason = self._seen.count, self.memory, self._need.reason
        if count > self._most:
            return self._fewer(self._most, f"more than the maximum, {self._most}")
        if memory.known_since is None or not memory.needs:
            return self._plan("hold" if self._need.workers is None else "observe", wanted, reason)
        floor = max(memory.needs[0][1], self._least)
        if floor >= count:
            return self._plan("observe", wanted, reason)
        since, window_s = self._now - memory.known_since, self._limits.down_window_s
        if since < window_s:
            wait = f"{floor} were enough for {since:.0f} of {window_s:.0f} s"
            return self._plan("pending", wanted, f"{reason}; {wait}")
        if wait := self._until_reversal(up=False):
            return self._plan("pending", wanted, f"{reason}; {wait}")
        return self._fewer(wanted, f"{floor} are enough: {reason}")

    def _fewer(self, wanted: int | None, reason: str) -> RolePlan:
        """One worker less, if one may be removed; none starts, and there are more than enough."""
        seen, stays = self._seen, ""
        if seen.counts.draining:
            stays = "a worker drains"
        elif seen.counts.ready < 1 or seen.serving < 2:
            stays = "the last one that serves stays"
        if stays:
            return self._plan("pending", wanted, f"{reason}; {stays}")
        change = Change(role=self._role, kind="remove", by=-1, reason=reason)
        return self._plan("pending", wanted, reason, fewer=change)

    def _under_way(self, wanted: int | None, *, more: bool) -> RolePlan | None:
        """What has to end first; None: nothing. Starts that are too slow are withdrawn.

        more: whether workers are missing.
        """
        counts, since = self._seen.counts, self.memory.starting_since
        if not counts.starting:
            if not more or not counts.draining:
                return None
            return self._plan("settling", wanted, "a removal is under way")
        waited_s = 0.0 if since is None else self._now - since
        late = None
        if waited_s > self._limits.start_timeout_s:
            late = Change(
                role=self._role,
                kind="withdraw",
                by=-counts.starting,
                reason=f"not ready after {waited_s:.0f} s",
            )
        return self._plan(
            "settling", wanted, f"a start is under way for {waited_s:.0f} s", fewer=late
        )

    def _until_retry(self) -> str:
        """Why no worker may be started now; empty if one may."""
        rest = self.memory.retry_at - self._now
        if rest <= 0:
            return ""
        return f"{self.memory.failures} starts have failed, the next one in {rest:.0f} s"

    def _until_reversal(self, *, up: bool) -> str:
        """Why a change in this direction has to wait for the last one; empty if it has not."""
        changed, limits = self.memory.changed, self._limits
        if changed is None or changed[0] is up:
            return ""
        rest = self.memory.changed_at + max(limits.cooldown_s, limits.start_s) - self._now
        if rest <= 0:
            return ""
        return f"the last change was {'down' if up else 'up'}: no reversal for {rest:.0f} s"

    def _plan(self, state: PlanState, wanted: int | None, reason: str, **what: Any) -> RolePlan:
        """what: `add` or `fewer`."""
        return RolePlan(state=state, count=self._seen.count, wanted=wanted, reason=reason, **what)

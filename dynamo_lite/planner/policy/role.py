"""One role: what is remembered of it, and what it wants before the budget of all. Pure."""

from dataclasses import dataclass, field, replace
from typing import Literal

from msgspec import structs

from dynamo_lite.planner.policy.inputs import Role, RoleSeen
from dynamo_lite.planner.policy.limits import bounds
from dynamo_lite.planner.policy.needs import Need
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import RoleCounts
from dynamo_lite.runtime.backoff import Backoff

#: Ticks in a row that must want more workers.
_UP_TICKS = 2
_START_BACKOFF = Backoff(first_s=30.0, factor=2.0, longest_s=1800.0)


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

    #: Workers that serve or will serve.
    count: int
    #: Within minimum and maximum, but for an operator's number that is reached; None: not known.
    wanted: int | None
    #: Why that many are wanted, and why nothing is done if nothing is.
    reason: str
    #: What it would do now; None: nothing.
    change: Change | None = None


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """All times are monotonic seconds."""

    #: The role in the last tick, with what was begun since.
    seen: RoleSeen = field(default_factory=RoleSeen)
    #: Ticks in a row that wanted more workers.
    up_ticks: int = 0
    #: Since when the load is known without a gap; None: it is not.
    known_since: float | None = None
    #: (time, workers needed) of the down window: a later entry is always smaller, so the first one
    #: is the window's maximum.
    needs: tuple[tuple[float, int], ...] = ()
    #: Since when workers start; None: there are none.
    starting_since: float | None = None
    #: Whether one of these starts has ended and no worker is ready for it.
    lost: bool = False
    #: Failed starts in a row, and when the next start may be tried.
    failures: int = 0
    retry_at: float = 0.0
    #: When `seen.changed` was seen first: the clocks of two hosts differ.
    changed_at: float = 0.0

    def without_window(self) -> "RoleMemory":
        return replace(self, known_since=None, needs=(), up_ticks=0)

    def noted(self, seen: RoleSeen, need: Need, limits: PlannerOptions, now: float) -> "RoleMemory":
        """With this tick's number, need and starts."""
        # Another process may have changed the number.
        made = self if self.seen.count == seen.count else self.without_window()
        if need.workers is None or not need.complete:
            made = replace(made, known_since=None, needs=())
        else:
            begin = now - limits.down_window_s
            kept = (one for one in made.needs if one[0] > begin and one[1] > need.workers)
            since = now if made.known_since is None else made.known_since
            made = replace(made, known_since=since, needs=(*kept, (now, need.workers)))
        if seen.changed != self.seen.changed:
            made = replace(made, changed_at=now)
        return replace(made._started(seen.counts, now), seen=seen)

    def _started(self, counts: RoleCounts, now: float) -> "RoleMemory":
        """With what has become of starts."""
        before = self.seen.counts
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
        retry_at = now + _START_BACKOFF.after_exit(self.failures)[1]
        failures = self.failures + 1
        return replace(self, starting_since=None, lost=False, failures=failures, retry_at=retry_at)

    def begun(self, change: Change, now: float) -> "RoleMemory":
        counts = self.seen.counts
        if change.kind == "remove":
            counts = structs.replace(counts, ready=counts.ready - 1, draining=counts.draining + 1)
        else:
            counts = structs.replace(counts, starting=counts.starting + change.by)
        made = replace(self, seen=replace(self.seen, counts=counts), up_ticks=0)
        if change.kind == "withdraw":
            return made._failed(now)
        return replace(made, starting_since=now) if change.kind == "add" else made


@dataclass(kw_only=True)
class RoleStep:
    """One tick of one role."""

    role: Role
    #: With this tick.
    memory: RoleMemory
    need: Need
    limits: PlannerOptions
    now: float

    def plan(self, manual: int | None) -> RolePlan:
        """manual: the number that an operator has set, regardless of the load. If it is reached,
        nothing changes, whatever the limits say."""
        count, (least, most) = self.memory.seen.count, bounds(self.limits, self.role)
        wanted = self.need.wanted(count) if manual is None else manual
        if wanted is not None and manual != count:
            wanted = min(max(wanted, least), most)
        goal = least if wanted is None else wanted
        ticks = self.memory.up_ticks + 1 if goal > count and manual is None else 0
        self.memory = replace(self.memory, up_ticks=ticks)
        if self.memory.seen.counts.starting:
            return self._starting(wanted)
        if goal > count:
            return self._up(goal, manual)
        if manual is None:
            return self._down(wanted)
        reason = f"an operator has set {goal}"
        return self._fewer(goal, reason) if goal < count else self._plan(goal, reason)

    def _starting(self, wanted: int | None) -> RolePlan:
        """Starts have to end first. Those that are too slow are withdrawn."""
        since, late = self.memory.starting_since, None
        waited_s = 0.0 if since is None else self.now - since
        if waited_s > self.limits.start_timeout_s:
            reason = f"not ready after {waited_s:.0f} s"
            by = -self.memory.seen.counts.starting
            late = Change(role=self.role, kind="withdraw", by=by, reason=reason)
        return self._plan(wanted, f"a start is under way for {waited_s:.0f} s", late)

    def _up(self, goal: int, manual: int | None) -> RolePlan:
        count, (least, _) = self.memory.seen.count, bounds(self.limits, self.role)
        add, wait = goal - count, ""
        reason = f"{add} more: {self.need.reason}"
        if manual is not None:
            reason = f"an operator has set {goal}"
        elif count < least:
            add, reason = least - count, f"fewer than the minimum, {least}"
        elif self.memory.up_ticks < _UP_TICKS:
            wait = "needed once so far"
        else:
            wait = self._until_reversal(up=True)
        if wait := self._until_retry() or wait:
            return self._plan(goal, f"{reason}; {wait}")
        change = Change(role=self.role, kind="add", by=add, reason=reason)
        return self._plan(goal, reason, change)

    def _down(self, wanted: int | None) -> RolePlan:
        """The window's maximum counts, so one busy moment keeps a worker for a whole window."""
        count, memory, reason = self.memory.seen.count, self.memory, self.need.reason
        least, most = bounds(self.limits, self.role)
        if count > most:
            return self._fewer(most, f"more than the maximum, {most}")
        floor = max(memory.needs[0][1], least) if memory.needs else count
        if memory.known_since is None or floor >= count:
            return self._plan(wanted, reason)
        since, window_s = self.now - memory.known_since, self.limits.down_window_s
        wait = self._until_reversal(up=False)
        if since < window_s:
            wait = f"{floor} were enough for {since:.0f} of {window_s:.0f} s"
        if wait:
            return self._plan(wanted, f"{reason}; {wait}")
        return self._fewer(wanted, f"{floor} are enough: {reason}")

    def _fewer(self, wanted: int | None, reason: str) -> RolePlan:
        """One worker less, if one may be removed."""
        if self.memory.seen.counts.draining:
            return self._plan(wanted, f"{reason}; a worker drains")
        if not self.memory.seen.counts.ready:
            return self._plan(wanted, f"{reason}; all are of other supervisors")
        change = Change(role=self.role, kind="remove", by=-1, reason=reason)
        return self._plan(wanted, reason, change)

    def _until_retry(self) -> str:
        """Why no worker may be started now; empty if one may."""
        rest = self.memory.retry_at - self.now
        if rest <= 0:
            return ""
        return f"{self.memory.failures} starts have failed, the next one in {rest:.0f} s"

    def _until_reversal(self, *, up: bool) -> str:
        """Why a change in this direction has to wait for the last one; empty if it has not."""
        changed, limits = self.memory.seen.changed, self.limits
        if changed is None or changed[0] is up:
            return ""
        rest = self.memory.changed_at + max(limits.cooldown_s, limits.start_s) - self.now
        if rest <= 0:
            return ""
        return f"the last change was {'down' if up else 'up'}: no reversal for {rest:.0f} s"

    def _plan(self, wanted: int | None, reason: str, change: Change | None = None) -> RolePlan:
        return RolePlan(count=self.memory.seen.count, wanted=wanted, reason=reason, change=change)

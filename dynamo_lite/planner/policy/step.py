"""One tick of one role: what it wants, before the budget of all roles is looked at. Pure."""

import math
from dataclasses import dataclass, replace

from dynamo_lite.planner.policy.inputs import Role, RoleSeen
from dynamo_lite.planner.policy.limits import bounds
from dynamo_lite.planner.policy.memory import Change, PlanState, RoleMemory, RolePlan
from dynamo_lite.planner.policy.needs import Need
from dynamo_lite.protocol.options import PlannerOptions

#: Ticks in a row that must want more workers.
UP_TICKS = 2
#: A step up is at most this share of the present number, or `_FREE_STEP`.
_UP_STEP, _FREE_STEP = 0.5, 4


@dataclass(frozen=True)
class RoleWish:
    """What one role wants, before the budget."""

    plan: RolePlan
    #: Workers to add.
    add: int = 0
    fewer: Change | None = None
    #: The removal that would make room for the other role; None: it cannot be borne.
    gives: Change | None = None


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
        #: After `wish` with this tick.
        self.memory = memory

    def wish(self, manual: int | None) -> RoleWish:
        """manual: the number that an operator has set, regardless of the load."""
        count = self._seen.count
        wanted = self._need.wanted(count) if manual is None else manual
        wanted = None if wanted is None else min(max(wanted, self._least), self._most)
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
        if goal < count:
            return self._fewer(goal, reason)
        return RoleWish(self._plan("observe", goal, reason))

    def _up(self, goal: int, manual: int | None) -> RoleWish:
        count = self._seen.count
        missing = goal - count
        add = min(missing, max(_FREE_STEP, math.ceil(count * _UP_STEP)))
        reason, wait = f"{missing} more: {self._need.reason}", ""
        if manual is not None:
            add, reason = missing, f"an operator has set {goal}"
        elif count < self._least:
            add = min(self._least - count, add)
            reason = f"fewer than the minimum, {self._least}"
        elif self.memory.up_ticks < UP_TICKS:
            wait = "needed once so far"
        else:
            wait = self._until_reversal(up=True)
        if wait := self._until_retry() or wait:
            return RoleWish(self._plan("pending", goal, f"{reason}; {wait}"))
        return RoleWish(self._plan("pending", goal, reason), add=add)

    def _down(self, wanted: int | None) -> RoleWish:
        """The window's maximum counts, so one busy moment keeps a worker for a whole window."""
        count, memory, reason = self._seen.count, self.memory, self._need.reason
        if count > self._most:
            return self._fewer(self._most, f"more than the maximum, {self._most}")
        if memory.known_since is None or not memory.needs:
            return RoleWish(
                self._plan("hold" if self._need.up is None else "observe", wanted, reason)
            )
        floor = max(memory.needs[0][1], self._least)
        if floor >= count:
            return RoleWish(self._plan("observe", wanted, reason), gives=self._gives())
        since, window_s = self._now - memory.known_since, self._limits.down_window_s
        if since < window_s:
            wait = f"{floor} were enough for {since:.0f} of {window_s:.0f} s"
            plan = self._plan("pending", wanted, f"{reason}; {wait}")
            return RoleWish(plan, gives=self._gives())
        if wait := self._until_reversal(up=False):
            return RoleWish(self._plan("pending", wanted, f"{reason}; {wait}"))
        return self._fewer(wanted, f"{floor} are enough: {reason}")

    def _gives(self) -> Change | None:
        """If one worker less was enough for the cooldown, though not for the down window."""
        memory, since = self.memory, self._now - self._limits.cooldown_s
        if memory.known_since is None or memory.known_since > since or self._seen.under_way:
            return None
        lately = max((number for at, number in memory.needs if at >= since), default=None)
        if lately is None or max(lately, self._least) >= self._seen.count:
            return None
        if self._until_reversal(up=False):
            return None
        other = Role.PREFILL if self._role is Role.DECODE else Role.DECODE
        return self._fewer(None, f"makes room for a {other.word} worker").fewer

    def _fewer(self, wanted: int | None, reason: str) -> RoleWish:
        """One worker less, if one may be removed."""
        seen, stays = self._seen, ""
        if seen.count - 1 < self._least:
            stays = "the minimum is reached"
        elif seen.counts.starting:
            stays = "a start is under way"
        elif seen.counts.draining:
            stays = "a worker drains"
        elif seen.counts.ready < 1 or seen.serving < 2:
            stays = "the last one that serves stays"
        if stays:
            return RoleWish(self._plan("pending", wanted, f"{reason}; {stays}"))
        change = Change(role=self._role, by=-1, reason=reason)
        return RoleWish(self._plan("pending", wanted, reason), fewer=change)

    def _under_way(self, wanted: int | None, *, more: bool) -> RoleWish | None:
        """What has to end first; None: nothing. Starts that are too slow are withdrawn.

        more: whether workers are missing.
        """
        counts, since = self._seen.counts, self.memory.starting_since
        if not counts.starting:
            if not more or not counts.draining:
                return None
            return RoleWish(self._plan("settling", wanted, "a removal is under way"))
        waited_s = 0.0 if since is None else self._now - since
        plan = self._plan("settling", wanted, f"a start is under way for {waited_s:.0f} s")
        if waited_s <= self._limits.start_timeout_s:
            return RoleWish(plan)
        reason = f"not ready after {waited_s:.0f} s"
        late = Change(role=self._role, by=-counts.starting, reason=reason, withdraws=True)
        return RoleWish(plan, fewer=late)

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

    def _plan(self, state: PlanState, wanted: int | None, reason: str) -> RolePlan:
        return RolePlan(state=state, count=self._seen.count, wanted=wanted, reason=reason)

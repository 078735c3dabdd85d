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

    #: Workers to add.
    add: int = 0
    fewer: Change | None = None
    #: It has passed its down check for the cooldown, so one may be removed for the other role.
    gives: bool = False


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
        self._role, self._memory, self._seen, self._need = role, memory, seen, need
        self._limits, self._now = limits, now
        self._least, self._most = bounds(limits, role)

    def manual(self, wanted: int) -> tuple[RoleMemory, RoleWish, RolePlan]:
        """Towards the number that an operator has set, regardless of the load."""
        count, wanted = self._seen.count, min(max(wanted, self._least), self._most)
        memory = replace(self._memory, up_ticks=0)
        reason = f"an operator has set {wanted}"
        if under_way := self._under_way(wanted, more=wanted > count):
            return memory, *under_way
        if wanted == count:
            return memory, RoleWish(), self._plan("observe", wanted, reason)
        wish = RoleWish()
        if wanted < count:
            removal, reason = self._removal(reason)
            wish = RoleWish(fewer=removal)
        elif wait := self._until_retry():
            reason = f"{reason}; {wait}"
        else:
            wish = RoleWish(add=wanted - count)
        return memory, wish, self._plan("pending", wanted, reason)

    def demand(self) -> tuple[RoleMemory, RoleWish, RolePlan]:
        """Towards what the load needs."""
        seen, need = self._seen, self._need
        wanted = need.wanted(seen.count)
        wanted = None if wanted is None else min(max(wanted, self._least), self._most)
        goal = max(self._least if wanted is None else wanted, self._least)
        below = seen.count < self._least
        memory = self._memory
        if goal > seen.count:
            memory = replace(memory, up_ticks=memory.up_ticks + 1)
        else:
            memory = replace(memory, up_ticks=0)
        if under_way := self._under_way(wanted, more=goal > seen.count):
            return memory, *under_way
        if goal > seen.count:
            return memory, *self._up(memory, goal, below)
        return memory, *self._down(memory, wanted)

    def _up(self, memory: RoleMemory, goal: int, below: bool) -> tuple[RoleWish, RolePlan]:
        seen = self._seen
        missing = goal - seen.count
        reason = f"{missing} more: {self._need.reason}"
        if below:
            missing, reason = self._least - seen.count, f"fewer than the minimum, {self._least}"
        if wait := self._until_retry():
            return RoleWish(), self._plan("pending", goal, f"{reason}; {wait}")
        if not below and memory.up_ticks < UP_TICKS:
            return RoleWish(), self._plan("pending", goal, f"{reason}; needed once so far")
        if not below and (wait := self._until_reversal(up=True)):
            return RoleWish(), self._plan("pending", goal, f"{reason}; {wait}")
        step = max(_FREE_STEP, math.ceil(seen.count * _UP_STEP))
        return RoleWish(add=min(missing, step)), self._plan("pending", goal, reason)

    def _down(self, memory: RoleMemory, wanted: int | None) -> tuple[RoleWish, RolePlan]:
        """The window's maximum counts, so one busy moment keeps a worker for a whole window."""
        seen, limits, now = self._seen, self._limits, self._now
        reason = self._need.reason
        if seen.count > self._most:
            removal, why = self._removal(f"more than the maximum, {self._most}")
            return RoleWish(fewer=removal), self._plan("pending", self._most, why)
        if memory.known_since is None or not memory.needs:
            state: PlanState = "hold" if self._need.up is None else "observe"
            return RoleWish(), self._plan(state, wanted, reason)
        floor = max(memory.needs[0][1], self._least)
        if floor >= seen.count:
            gives = self._gives(memory)
            return RoleWish(gives=gives), self._plan("observe", wanted, reason)
        since = now - memory.known_since
        if since < limits.down_window_s:
            wait = f"{floor} were enough for {since:.0f} of {limits.down_window_s:.0f} s"
            gives = self._gives(memory)
            return RoleWish(gives=gives), self._plan("pending", wanted, f"{reason}; {wait}")
        if wait := self._until_reversal(up=False):
            return RoleWish(), self._plan("pending", wanted, f"{reason}; {wait}")
        removal, why = self._removal(f"{floor} are enough: {reason}")
        return RoleWish(fewer=removal, gives=True), self._plan("pending", wanted, why)

    def _gives(self, memory: RoleMemory) -> bool:
        """Whether one worker less was enough for the cooldown, though not for the down window."""
        since = self._now - self._limits.cooldown_s
        if memory.known_since is None or memory.known_since > since or self._seen.under_way:
            return False
        lately = max((number for at, number in memory.needs if at >= since), default=None)
        if lately is None or max(lately, self._least) >= self._seen.count:
            return False
        return not self._until_reversal(up=False)

    def removal_for(self, other: Role) -> Change | None:
        return self._removal(f"makes room for a {other.value} worker")[0]

    def _removal(self, reason: str) -> tuple[Change | None, str]:
        """The removal of one worker, if one may be removed; and the reason for what is done."""
        seen = self._seen
        if seen.count - 1 < self._least:
            return None, f"{reason}; the minimum is reached"
        if seen.counts.starting:
            return None, f"{reason}; a start is under way"
        if seen.counts.draining:
            return None, f"{reason}; a worker drains"
        if seen.counts.ready < 1 or seen.serving < 2:
            return None, f"{reason}; the last one that serves stays"
        return Change(role=self._role, by=-1, reason=reason), reason

    def _under_way(self, wanted: int | None, *, more: bool) -> tuple[RoleWish, RolePlan] | None:
        """What has to end first; None: nothing. Starts that are too slow are withdrawn.

        more: whether workers are missing.
        """
        counts, since = self._seen.counts, self._memory.starting_since
        if not counts.starting:
            if not more or not counts.draining:
                return None
            return RoleWish(), self._plan("settling", wanted, "a removal is under way")
        waited_s = 0.0 if since is None else self._now - since
        plan = self._plan("settling", wanted, f"a start is under way for {waited_s:.0f} s")
        if waited_s <= self._limits.start_timeout_s:
            return RoleWish(), plan
        reason = f"not ready after {waited_s:.0f} s"
        late = Change(role=self._role, by=-counts.starting, reason=reason, withdraws=True)
        return RoleWish(fewer=late), plan

    def _until_retry(self) -> str:
        """Why no worker may be started now; empty if one may."""
        rest = self._memory.retry_at - self._now
        if rest <= 0:
            return ""
        return f"{self._memory.failures} starts have failed, the next one in {rest:.0f} s"

    def _until_reversal(self, *, up: bool) -> str:
        """Why a change in this direction has to wait for the last one; empty if it has not."""
        memory = self._memory
        if memory.changed is None or memory.changed[0] is up:
            return ""
        wait_s = max(self._limits.cooldown_s, self._limits.start_s)
        rest = memory.changed_at + wait_s - self._now
        if rest <= 0:
            return ""
        return f"the last change was {'down' if up else 'up'}: no reversal for {rest:.0f} s"

    def _plan(self, state: PlanState, wanted: int | None, reason: str) -> RolePlan:
        return RolePlan(state=state, count=self._seen.count, wanted=wanted, reason=reason)

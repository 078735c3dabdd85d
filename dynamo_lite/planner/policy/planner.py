"""Chooses the numbers of prefill and decode workers. Pure: values in, a proposal out.

`plan` is called every tick with what is seen (`inputs.py`) and with its own memory of the ticks
before; `begun` adds to it what was done of the proposal. How many workers a load needs is
`needs.py`. When a need becomes an order is `role.py`; the budget of all roles is here:

- More workers: needed in two ticks in a row.
- Fewer: needed in no tick of the whole down window, and the load was known all the time. One at a
  time.
- After a change, none in the other direction for the longer of the cooldown and the time of a
  start.
- All workers together stay within the budget, starting and draining ones included. When it is
  full, a role that needs more waits until one of the other has left.
- A change by an operator or another process is accepted: the new number is where the next
  decision starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dynamo_lite.planner.policy.inputs import Role, Seen
from dynamo_lite.planner.policy.needs import Need, decode_need, prefill_need
from dynamo_lite.planner.policy.role import Change, RoleMemory, RolePlan, RoleStep
from dynamo_lite.planner.policy.work import Tick, Work
from dynamo_lite.protocol.options import PlannerOptions

#: Without a tick for this many tick times the load counts as unknown in between.
_MISSED_TICKS = 3
#: A prefill worker with a backlog of this many seconds is busy.
_BUSY_S = 1.0
#: Share of the difference to a lower rate that each tick believes, with and without a backlog.
_BELIEVES, _FORGETS = 0.1, 0.005


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The result of one tick."""

    actions: tuple[Change, ...] = ()
    roles: Mapping[Role, RolePlan] = field(default_factory=dict[Role, RolePlan])


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


def plan(
    memory: PlannerMemory, seen: Seen, limits: PlannerOptions, now: float
) -> tuple[PlannerMemory, Proposal]:
    """One tick. now: monotonic seconds."""
    known = memory.roles
    missed = memory.at is not None and now - memory.at > _MISSED_TICKS * limits.tick_s
    if missed or not seen.roles:
        known = {role: each.without_window() for role, each in known.items()}
    if not seen.roles:
        return replace(memory, at=now, roles=known), Proposal()
    memory = replace(
        memory,
        at=now,
        prefill_rate=_prefill_rate(memory.prefill_rate, seen),
        work=_worked(memory.work, seen, now),
    )
    steps: dict[Role, RoleStep] = {}
    for role, one in seen.roles.items():
        need = _need(role, memory, seen, limits)
        mine = known.get(role, RoleMemory()).noted(one, need, limits, now)
        steps[role] = RoleStep(role=role, memory=mine, need=need, limits=limits, now=now)
    wishes = {role: step.plan(seen.manual.get(role)) for role, step in steps.items()}
    memory = replace(memory, roles={role: step.memory for role, step in steps.items()})
    actions, plans = _within_budget(seen, wishes, limits)
    return memory, Proposal(actions=actions, roles=plans)


def begun(memory: PlannerMemory, change: Change) -> PlannerMemory:
    """With a change of the last proposal that was really begun; call it for each of them. A start
    that was refused counts as begun: it fails."""
    one = memory.roles.get(change.role, RoleMemory()).begun(change, memory.at or 0.0)
    return replace(memory, roles={**memory.roles, change.role: one})


def _prefill_rate(known: float | None, seen: Seen) -> float | None:
    """The rate of a prefill worker that has enough to do. One that has not looks slower: it counts
    as busy while a single job is on its way. So a lower rate is believed only under a backlog."""
    prefill = seen.roles.get(Role.PREFILL)
    measured = seen.prefill.rate
    if prefill is None or measured is None:
        return known
    backlog = seen.prefill.backlog or 0.0
    if known is None:
        return measured
    busy = measured > known or backlog > _BUSY_S * measured * prefill.serving
    return known + (measured - known) * (_BELIEVES if busy else _FORGETS)


def _worked(work: Work, seen: Seen, now: float) -> Work:
    load, decode = seen.decode, seen.roles.get(Role.DECODE)
    admitted, queued = load.admitted_per_s, load.queued
    if admitted is None or queued is None:
        return work.unknown()
    tokens_per_s, token_s, batch = load.tokens_per_s, load.token_s, None
    if tokens_per_s and token_s and decode is not None and decode.serving:
        # By Little's law. The number that runs at the end of the tick is another one, and would
        # make the line flatter than it is.
        batch = tokens_per_s * token_s / decode.serving
    tick = Tick(
        at=now,
        admitted=admitted,
        queued=queued,
        output=tokens_per_s,
        prefill=seen.prefill.arriving_per_s,
        kv=load.kv_used,
        running=load.running or None,
        batch=batch,
        token_s=token_s,
    )
    return work.add(tick)


def _need(role: Role, memory: PlannerMemory, seen: Seen, limits: PlannerOptions) -> Need:
    count, work = seen.roles[role].count, memory.work
    if role is Role.DECODE:
        return decode_need(seen.decode, limits, count=count, work=work)
    return prefill_need(seen.prefill, limits, count=count, rate=memory.prefill_rate, work=work)


def _within_budget(
    seen: Seen, plans: Mapping[Role, RolePlan], limits: PlannerOptions
) -> tuple[tuple[Change, ...], dict[Role, RolePlan]]:
    """The changes that the budget allows: fewer workers, then more."""
    changes = [plan.change for plan in plans.values() if plan.change is not None]
    fewer = [change for change in changes if change.by < 0]
    more = {change.role: change for change in changes if change.by > 0}
    granted = _granted(seen, more, limits)
    without = {
        role: replace(plans[role], reason=f"no device is free within the budget; {change.reason}")
        for role, change in more.items()
        if not granted[role]
    }
    added = [replace(more[role], by=number) for role, number in granted.items() if number]
    return (*fewer, *added), {**plans, **without}


def _granted(seen: Seen, more: Mapping[Role, Change], limits: PlannerOptions) -> dict[Role, int]:
    """Workers to add, one for each role in turn, prefill workers first: their lack fills the KV of
    decode workers, too."""
    room = limits.budget_devices - sum(role.devices for role in seen.roles.values())
    granted, taken = dict.fromkeys(more, 0), 0
    open_roles = list(more)
    while open_roles:
        for role in list(open_roles):
            counts, each = seen.roles[role].counts, seen.roles[role].devices_each
            short = counts.devices_each and taken + each > counts.devices_free
            if taken + each > room or short or granted[role] >= more[role].by:
                open_roles.remove(role)
                continue
            granted[role] += 1
            taken += each
    return granted

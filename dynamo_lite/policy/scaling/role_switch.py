"""When a worker changes its role, instead of one being removed and another one added. Pure.

A switch is a drain and a start, one after the other, on the device of the worker that leaves. It is
right only where no other device is free or becomes free as soon: otherwise a start there costs no
drain. The role that gives has passed its own check with one worker less.
"""

from dataclasses import dataclass

from dynamo_lite.policy.scaling.inputs import Role, RoleSeen, Seen
from dynamo_lite.policy.scaling.memory import RemoveWorker, SwitchWorker
from dynamo_lite.policy.scaling.step import start_s
from dynamo_lite.protocol.options import PlannerOptions

#: A role that has given a worker does not get one back for this long.
DWELL_S = 300.0
#: Assumed time of a drain until one was measured.
_DRAIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Duration, in seconds, of both ways to get another worker."""

    #: From now until a worker of the giving role has drained,
    drain_s: float
    #: and from then until the other one is ready in its place.
    switch_s: float
    #: From now until a device becomes free otherwise; None: none will be.
    free_s: float | None
    #: Duration of a start on such a device.
    start_s: float


@dataclass(frozen=True)
class WaitToSwitch:
    """No switch now, and nothing in its place."""

    reason: str


@dataclass(frozen=True)
class Unfit:
    """No switch: room is made by a removal."""

    reason: str


def judge(
    seen: Seen, removal: RemoveWorker, to: Role, need: str, limits: PlannerOptions
) -> SwitchWorker | WaitToSwitch | Unfit:
    """What happens while `to` needs a worker and has no room for it.

    removal: a removal that the other role can afford, by its own check. need: why the worker is
    needed.
    """
    switches = seen.switches
    if switches is None:
        return Unfit("workers cannot switch roles where they run")
    giver, taker = seen.roles[removal.role], seen.roles[to]
    if removal.starting:
        return Unfit("a worker that starts is cancelled first")
    if taker.counts.devices_each > giver.counts.devices_each:
        return Unfit("its worker needs more devices")
    if giver.operations or taker.operations:
        return WaitToSwitch("another change is under way")
    # What an operator sets is done at once.
    if switches.last_giver == to and not seen.manual and switches.last_age_s < DWELL_S:
        rest = DWELL_S - switches.last_age_s
        return WaitToSwitch(f"it gave a worker itself: none back for {rest:.0f} s")
    ways = _ways(seen, taker, limits)
    if ways.free_s is not None and not _quicker(ways):
        return WaitToSwitch("a worker drains: its device is free as soon")
    other = "no other device is free" if ways.free_s is None else "that is sooner than any other"
    reason = (
        f"becomes a {to.value} worker, drain {ways.drain_s:.0f} s and start {ways.switch_s:.0f} s:"
        f" {other} within the budget, and {removal.role.value} can do with one less; {need}"
    )
    return SwitchWorker(role=removal.role, to=to, reason=reason)


def _quicker(ways: Ways) -> bool:
    return ways.drain_s + ways.switch_s < (ways.free_s or 0.0) + ways.start_s


def _ways(seen: Seen, taker: RoleSeen, limits: PlannerOptions) -> Ways:
    switches = seen.switches
    assert switches is not None
    drain_s = _DRAIN_S if switches.drain_s is None else switches.drain_s
    started_s = start_s(taker, limits)
    return Ways(
        drain_s=drain_s,
        switch_s=started_s if switches.start_s is None else switches.start_s,
        free_s=drain_s if any(role.counts.draining for role in seen.roles.values()) else None,
        start_s=started_s,
    )

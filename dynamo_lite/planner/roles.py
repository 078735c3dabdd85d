"""Numbers, members and operations put together, as what the policy sees of each role."""

from collections.abc import Callable, Collection, Mapping

import msgspec

from dynamo_lite.planner.connector import COMPONENTS, Counted
from dynamo_lite.planner.observation import Observed
from dynamo_lite.planner.policy.inputs import LastChange, Role, RoleSeen, Seen
from dynamo_lite.planner.policy.limits import bounds
from dynamo_lite.planner.under_way import UnderWay
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import Change, RoleCounts, TargetRecord


class LastChanges:
    """When the last change of each component was ordered, also by another planner: since this
    process knows of it. The clocks of two hosts differ. now: monotonic."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._known: dict[str, tuple[Change, float]] = {}

    def note(self, target: TargetRecord | None) -> None:
        for component, change in ({} if target is None else target.changes).items():
            if component not in self._known or self._known[component][0] != change:
                self._known[component] = change, self._now()

    def of(self, component: str) -> LastChange | None:
        if component not in self._known:
            return None
        change, since = self._known[component]
        return LastChange(up=change.up, age_s=self._now() - since)


def roles_seen(
    observed: Observed,
    number: Counted,
    under_way: UnderWay,
    members: Collection[int],
    changes: LastChanges,
) -> dict[Role, RoleSeen]:
    """members: leases of all live processes."""
    seen: dict[Role, RoleSeen] = {}
    for role, component in COMPONENTS.items():
        if component not in number.roles:
            continue
        counts = _without_leaving(number.roles[component], under_way.leaving(component))
        serving = observed.serving(role, under_way.victims(members))
        done, failed = under_way.starts(component)
        seen[role] = RoleSeen(
            counts=counts,
            others=max(serving - counts.ready - counts.starting, 0),
            operations=under_way.of(component),
            youngest_s=observed.youngest_s(role),
            starts_done=done,
            starts_failed=failed,
            changed=changes.of(component),
        )
    return seen


def _without_leaving(counts: RoleCounts, leaving: int) -> RoleCounts:
    """Workers that leave still run by the numbers of who starts workers, but without a lease."""
    ready = min(leaving, counts.ready)
    starting = min(leaving - ready, counts.starting)
    return msgspec.structs.replace(
        counts,
        ready=counts.ready - ready,
        starting=counts.starting - starting,
        draining=counts.draining + leaving,
    )


def manual_counts(
    target: TargetRecord | None, roles: Mapping[Role, RoleSeen], *, paused: bool
) -> dict[Role, int]:
    """The numbers that an operator has set and that are not reached yet. While paused, they are
    reached and nothing else is done."""
    manual = {} if target is None else target.manual
    wanted = {role: manual[COMPONENTS[role]] for role in roles if COMPONENTS[role] in manual}
    if wanted and paused:
        wanted = {role: one.count for role, one in roles.items()} | wanted
    return wanted


def reached(target: TargetRecord | None, seen: Seen, limits: PlannerOptions) -> dict[str, int]:
    """Those of them that are, by component."""
    found: dict[str, int] = {}
    for role, wanted in manual_counts(target, seen.roles, paused=False).items():
        one, (least, most) = seen.roles[role], bounds(limits, role)
        settled = not one.operations and not one.counts.starting
        if settled and one.count == min(max(wanted, least), most):
            found[COMPONENTS[role]] = wanted
    return found

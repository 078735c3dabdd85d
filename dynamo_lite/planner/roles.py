"""Numbers, members and the record put together, as what the policy sees of each role."""

from collections.abc import Callable, Collection, Mapping

import msgspec

from dynamo_lite.planner.connector import COMPONENTS
from dynamo_lite.planner.observation import Observed
from dynamo_lite.planner.policy.inputs import LastChange, Role, RoleSeen
from dynamo_lite.protocol.planner import RoleCounts, WantedRecord, WantedWorkers


class LastChanges:
    """When the last change of each component was ordered, also by another planner: since this
    process knows of it. The clocks of two hosts differ. now: monotonic."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._known: dict[str, tuple[tuple[bool, float], float]] = {}

    def of(self, component: str, role: WantedWorkers | None) -> LastChange | None:
        if role is None:
            return None
        change = role.up, role.at
        if component not in self._known or self._known[component][0] != change:
            self._known[component] = change, self._now()
        return LastChange(up=role.up, age_s=self._now() - self._known[component][1])


def roles_seen(
    observed: Observed,
    counts: Mapping[str, RoleCounts],
    wanted: WantedRecord,
    foreign: Collection[int],
    changes: LastChanges,
    before: Mapping[Role, int],
) -> dict[Role, RoleSeen]:
    """foreign: leases of workers that cannot be removed here. before: the last `others`."""
    seen: dict[Role, RoleSeen] = {}
    for role, component in COMPONENTS.items():
        if component not in counts:
            continue
        now, record = counts[component], wanted.roles.get(component)
        others = len(observed.serving(role).intersection(foreign))
        # One that starts is a member before its supervisor knows its lease.
        others = max(others - now.starting, min(before.get(role, 0), others))
        seen[role] = RoleSeen(
            counts=_without_leaving(now, 0 if record is None else len(record.leaving)),
            others=others,
            youngest_s=observed.youngest_s(role),
            failures=0 if record is None else record.failures,
            changed=changes.of(component, record),
        )
    return seen


def _without_leaving(counts: RoleCounts, leaving: int) -> RoleCounts:
    """Pods that drain still run by the numbers of Kubernetes, but without a lease."""
    # Their readiness fails, so most of them count as starting.
    starting = min(leaving, counts.starting)
    ready = min(leaving - starting, counts.ready)
    return msgspec.structs.replace(
        counts,
        ready=counts.ready - ready,
        starting=counts.starting - starting,
        draining=counts.draining + leaving,
    )


def manual_counts(
    wanted: WantedRecord, roles: Mapping[Role, RoleSeen], *, paused: bool
) -> dict[Role, int]:
    """The numbers that an operator has set and that are not reached yet. While paused, they are
    reached and nothing else is done."""
    found = {
        role: wanted.manual[COMPONENTS[role]] for role in roles if COMPONENTS[role] in wanted.manual
    }
    if found and paused:
        found = {role: one.count for role, one in roles.items()} | found
    return found

"""The numbers that an operator has set, until they are reached."""

from collections.abc import Mapping

from dynamo_lite.policy.scaling.inputs import Role, RoleSeen, Seen
from dynamo_lite.policy.scaling.limits import bounds
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.services.planner.connector import COMPONENTS
from dynamo_lite.services.planner.records import PlannerRecords
from dynamo_lite.services.planner.target import Target


class Manual:
    """The target record has them."""

    def __init__(self, records: PlannerRecords, target: Target):
        self._records, self._target = records, target

    def wanted(self, roles: Mapping[Role, RoleSeen]) -> dict[Role, int]:
        """While paused, what an operator sets is done, and nothing else."""
        target = self._records.target
        if target is None or not target.manual:
            return {}
        wanted = {
            role: target.manual[COMPONENTS[role]]
            for role in roles
            if COMPONENTS[role] in target.manual
        }
        if wanted and self._records.paused:
            wanted = {role: one.count for role, one in roles.items()} | wanted
        return wanted

    async def finish(self, seen: Seen, limits: PlannerOptions) -> None:
        """Forgets what is reached. Raises Unavailable."""
        target = self._records.target
        if target is None or not target.manual:
            return
        reached: dict[str, int] = {}
        for role, one in seen.roles.items():
            wanted = target.manual.get(COMPONENTS[role])
            least, most = bounds(limits, role)
            if wanted is None or one.operations or one.counts.starting:
                continue
            if one.count == min(max(wanted, least), most):
                reached[COMPONENTS[role]] = wanted
        if reached:
            await self._target.reached(reached)

"""Planners that lack one of their safeguards. The simulation must detect each."""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dynamo_lite.overview.metrics import Samples
from dynamo_lite.policy.scaling.drain import Safe, Unsafe
from dynamo_lite.policy.scaling.inputs import PrefillLoad, Role, RoleSeen, Seen
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.services.planner.connector import COMPONENTS, Connector, Counted
from dynamo_lite.services.planner.departure import Departure, worker_of
from dynamo_lite.services.planner.observation import Observed
from dynamo_lite.services.planner.planner import Planner
from dynamo_lite.services.planner.records import PlannerRecords
from dynamo_lite.services.planner.under_way import RunningOperation
from tests.simulation.mutant import Mutant
from tests.simulation.shipped import Shipped


class PlannerMutant(Shipped):
    """Its planners are of another class."""

    kind: type[Planner]

    def planner(
        self, config: dict[str, Any], spec: ProcessSpec, connector: Connector | None
    ) -> Planner:
        return self.kind(config, spec, connector)


class _KillsHastily(Planner):
    departure: type[Departure]

    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        await_leaving = self._operations._await_leaving

        async def await_hastily(one: RunningOperation, counted: Counted) -> None:
            if one.departure is None:
                worker = worker_of(one.record, self._spec.namespace)
                one.departure = self.departure(worker, host.clock.monotonic)
            await await_leaving(one, counted)

        self._operations._await_leaving = await_hastily
        return facts


class _IdleDeparture(Departure):
    async def look(self, members: Iterable[EndpointRecord]) -> Safe | Unsafe:
        verdict = await super().look(members)
        if not self.leaving.listed and self.leaving.in_flight == 0:
            return Safe(reason="idle")
        return verdict


class _KillsOnIdle(_KillsHastily):
    departure = _IdleDeparture


class _HastyDeparture(Departure):
    async def look(self, members: Iterable[EndpointRecord]) -> Safe | Unsafe:
        verdict = await super().look(members)
        return verdict if self.leaving.listed else Safe(reason="it gets nothing new")


class KillsOnIdleAlone(PlannerMutant):
    """A worker without requests or jobs is ended, even while writes for it or into it may go on."""

    kind = _KillsOnIdle


class _KillsUnlisted(_KillsHastily):
    departure = _HastyDeparture


class KillsWithClaims(PlannerMutant):
    """A worker that gets nothing new is ended, whatever it has claimed."""

    kind = _KillsUnlisted


class _AlwaysLeads(PlannerRecords):
    @property
    def leads(self) -> bool:
        return True

    @property
    def why_not(self) -> str:
        return ""


class _Usurper(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        assert self._records is not None
        self._records.__class__ = _AlwaysLeads
        return facts


class ActsWithoutLeadership(PlannerMutant):
    """A planner acts also while another one leads."""

    kind = _Usurper


class _WetRun(_Usurper):
    def _hold(self, manual: bool) -> str:
        return ""


class ActsInDryRun(Shipped):
    """A planner in a dry run acts."""

    def planner(
        self, config: dict[str, Any], spec: ProcessSpec, connector: Connector | None
    ) -> Planner:
        kind = _WetRun if config["dry_run"] else Planner
        return kind(config, spec, connector)


class Sees(Planner, abc.ABC):
    """A planner with wrong facts about its workers."""

    def _seen(self, observed: Observed, number: Counted | None) -> Seen:
        seen = super()._seen(observed, number)
        roles = {role: self._other(one) for role, one in seen.roles.items()}
        return dataclasses.replace(seen, roles=roles)

    @abc.abstractmethod
    def _other(self, one: RoleSeen) -> RoleSeen:
        """What it sees instead."""


class SeesNoDraining(Sees):
    def _other(self, one: RoleSeen) -> RoleSeen:
        return dataclasses.replace(one, counts=msgspec.structs.replace(one.counts, draining=0))


class DrainingCostsNothing(PlannerMutant):
    """The devices of draining workers do not count in the budget."""

    kind = SeesNoDraining


class PicksAny(Sees, abc.ABC):
    """A planner that removes any worker, and not only one that others can replace."""

    async def _victim(self, role: Role) -> EndpointRecord | None:
        spared = self._under_way.victims(self._observation.members)
        return next(
            (
                member
                for lease_id, member in sorted(self._observation.members.items())
                if member.component == COMPONENTS[role] and lease_id not in spared
            ),
            None,
        )


class _SeesAllReady(PicksAny):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        self._operations._too_few = lambda record, counts: ""
        return facts

    def _other(self, one: RoleSeen) -> RoleSeen:
        ready = one.counts.ready + one.counts.starting
        return dataclasses.replace(
            one, counts=msgspec.structs.replace(one.counts, ready=ready, starting=0)
        )


class RemovesTheLast(PlannerMutant):
    """Workers that start or have crashed count as if they served."""

    kind = _SeesAllReady


class _StaleIsZero(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        prefill = self._observation._prefill

        def zero(decode: Sequence[Samples | None]) -> PrefillLoad:
            load, none = prefill(decode), 0.0
            return PrefillLoad(
                asked_per_s=load.asked_per_s or none,
                refused_per_s=load.refused_per_s or none,
                backlog=load.backlog or none,
                rate=load.rate or 1.0,
            )

        self._observation._prefill = zero
        return facts


class StaleCountsAsZero(PlannerMutant):
    """An unknown load counts as no load."""

    kind = _StaleIsZero


class _NoMaximum(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        self._limits = dataclasses.replace(self._limits, prefill_max=8, decode_max=8)
        return facts


class IgnoresTheMaximum(PlannerMutant):
    """The maximum of a role does not count."""

    kind = _NoMaximum


class _NoMinimum(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        self._limits = dataclasses.replace(self._limits, prefill_min=1, decode_min=1)
        return facts


class IgnoresTheMinimum(PlannerMutant):
    """The minimum of a role does not count, but one worker stays."""

    kind = _NoMinimum


class _SeesNoChange(Sees):
    def _other(self, one: RoleSeen) -> RoleSeen:
        return dataclasses.replace(one, changed=None)


class ReversesAtOnce(PlannerMutant):
    """A change does not wait for the last one, which went the other way."""

    kind = _SeesNoChange


#: By the name that the command line takes.
PLANNER_MUTANTS: dict[str, Mutant] = {
    "kills-on-idle-alone": Mutant(KillsOnIdleAlone, "it may still be written into"),
    "kills-with-claims": Mutant(KillsWithClaims, "may still be written by it"),
    "acts-without-leadership": Mutant(ActsWithoutLeadership, "it does not lead"),
    "acts-in-dry-run": Mutant(ActsInDryRun, "it is in a dry run"),
    "draining-costs-nothing": Mutant(DrainingCostsNothing, "occupied, and the budget is"),
    "removes-the-last": Mutant(RemovesTheLast, "removed, and it is the last one"),
    "stale-counts-as-zero": Mutant(StaleCountsAsZero, "was decided without NATS"),
    "ignores-the-maximum": Mutant(IgnoresTheMaximum, "are the most"),
    "ignores-the-minimum": Mutant(IgnoresTheMinimum, "are fewer than"),
    "reverses-at-once": Mutant(ReversesAtOnce, "a reversal after"),
}

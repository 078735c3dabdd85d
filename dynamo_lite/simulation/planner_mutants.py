"""Planners that lack one of their safeguards. The simulation must detect each."""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dynamo_lite.overview.model import LiveProcess
from dynamo_lite.policy.drain import Safe, Unsafe
from dynamo_lite.policy.planner_inputs import Datum, PrefillLoad, Role, RoleSeen, Seen
from dynamo_lite.protocol.planner import RoleCounts
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.services.planner.connector import COMPONENTS, Connector, Counted
from dynamo_lite.services.planner.departure import Departure
from dynamo_lite.services.planner.observation import Observed
from dynamo_lite.services.planner.planner import Planner
from dynamo_lite.services.planner.records import PlannerRecords
from dynamo_lite.services.planner.under_way import RunningOperation
from dynamo_lite.simulation.shipped import Shipped


class PlannerMutant(Shipped):
    """Its planners are of another class."""

    kind: type[Planner]

    def planner(
        self, config: dict[str, Any], spec: ProcessSpec, connector: Connector | None
    ) -> Planner:
        return self.kind(config, spec, connector)


class _IdleDeparture(Departure):
    async def look(self, members: Iterable[EndpointRecord]) -> Safe | Unsafe:
        verdict = await super().look(members)
        if not self._leaving.listed and self._leaving.in_flight == 0:
            return Safe(reason="idle")
        return verdict


class _KillsOnIdle(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        await_leaving = self._operations._await_leaving

        async def await_idle(one: RunningOperation, counted: Counted) -> None:
            if one.departure is None:
                namespace = self._spec.namespace
                one.departure = _IdleDeparture(one.record, namespace, host.clock.monotonic)
            await await_leaving(one, counted)

        self._operations._await_leaving = await_idle
        return facts


class KillsOnIdleAlone(PlannerMutant):
    """A worker without requests or jobs is ended, even while writes for it or into it may go on."""

    kind = _KillsOnIdle


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


class _Sees(Planner, abc.ABC):
    """A planner with wrong facts about its workers."""

    def _seen(self, observed: Observed, number: Counted | None) -> Seen:
        seen = super()._seen(observed, number)
        roles = {role: self._other(one) for role, one in seen.roles.items()}
        return dataclasses.replace(seen, roles=roles)

    @abc.abstractmethod
    def _other(self, one: RoleSeen) -> RoleSeen:
        """What it sees instead."""


class _SeesNoDraining(_Sees):
    def _other(self, one: RoleSeen) -> RoleSeen:
        return dataclasses.replace(one, counts=msgspec.structs.replace(one.counts, draining=0))


class DrainingCostsNothing(PlannerMutant):
    """The devices of draining workers do not count in the budget."""

    kind = _SeesNoDraining


class _SeesAllReady(_Sees):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        self._operations._too_few = lambda record, counts: ""
        return facts

    def _other(self, one: RoleSeen) -> RoleSeen:
        ready = one.counts.ready + one.counts.starting
        return dataclasses.replace(
            one, counts=msgspec.structs.replace(one.counts, ready=ready, starting=0)
        )

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


class RemovesTheLast(PlannerMutant):
    """Workers that start or have crashed count as if they served."""

    kind = _SeesAllReady


class _StaleIsZero(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        prefill = self._observation._prefill

        def zero(decode: Sequence[LiveProcess]) -> PrefillLoad:
            load, none = prefill(decode), Datum(0.0)
            return PrefillLoad(
                asked_per_s=load.asked_per_s or none,
                refused_per_s=load.refused_per_s or none,
                backlog=load.backlog or none,
                rate=load.rate or Datum(1.0),
            )

        self._observation._prefill = zero
        return facts


class StaleCountsAsZero(PlannerMutant):
    """An unknown load counts as no load."""

    kind = _StaleIsZero


class _DoesItAgain(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        order_additions = self._operations._order_additions

        async def order_all(one: RunningOperation, counted: Counted, counts: RoleCounts) -> None:
            if one.resumed:
                counts = RoleCounts(ready=one.record.before)
            await order_additions(one, counted, counts)

        self._operations._order_additions = order_all
        return facts


class DoneTwice(PlannerMutant):
    """A resumed addition starts from the beginning, whatever was ordered before the crash."""

    kind = _DoesItAgain


class _Forgetful(_SeesNoDraining):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        self._under_way.of = lambda component: ()
        return facts


class TwoOperations(PlannerMutant):
    """A role gets another operation while one is under way."""

    kind = _Forgetful


class _Unrecorded(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        enter = self._under_way.enter

        async def enter_later(one: RunningOperation, phase: Any) -> None:
            if phase == "ordered":
                one.stored = True
            else:
                await enter(one, phase)

        self._under_way.enter = enter_later
        return facts


class OrdersBeforeItsRecord(PlannerMutant):
    """A change is recorded when its orders were taken."""

    kind = _Unrecorded


class _Boundless(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        self._limits = dataclasses.replace(self._limits, prefill_max=8, decode_max=8, decode_min=1)
        return facts


class IgnoresBounds(PlannerMutant):
    """Minimum and maximum of a role do not count."""

    kind = _Boundless


#: By the name that the command line takes.
PLANNER_MUTANTS: dict[str, type[Shipped]] = {
    "kills-on-idle-alone": KillsOnIdleAlone,
    "acts-without-leadership": ActsWithoutLeadership,
    "acts-in-dry-run": ActsInDryRun,
    "draining-costs-nothing": DrainingCostsNothing,
    "removes-the-last": RemovesTheLast,
    "stale-counts-as-zero": StaleCountsAsZero,
    "done-twice": DoneTwice,
    "two-operations": TwoOperations,
    "orders-before-its-record": OrdersBeforeItsRecord,
    "ignores-bounds": IgnoresBounds,
}

#: A seed that finds each of them.
FOUND_BY: dict[str, int] = {
    "kills-on-idle-alone": 199,
    "acts-without-leadership": 79,
    "acts-in-dry-run": 49,
    "draining-costs-nothing": 29,
    "removes-the-last": 89,
    "stale-counts-as-zero": 1129,
    "done-twice": 139,
    "two-operations": 29,
    "orders-before-its-record": 19,
    "ignores-bounds": 9,
}

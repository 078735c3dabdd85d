"""Planners that lack one of their safeguards. The simulation must detect each."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from dynamo_lite.planner.departure import Departure, worker_of
from dynamo_lite.planner.observation import Observed
from dynamo_lite.planner.planner import Planner
from dynamo_lite.planner.policy.drain import Safe, Unsafe
from dynamo_lite.planner.policy.inputs import RoleSeen, Seen
from dynamo_lite.planner.record import PlannerRecords, WantedEdit
from dynamo_lite.protocol.planner import LeavingWorker, RoleCounts, WantedRecord, WantedWorkers
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.process.component import Host
from tests.simulation.loop.process import PROCESS
from tests.simulation.shipped import Mutant, Shipped


class _IdleDeparture(Departure):
    async def look(self, members: Iterable[EndpointRecord]) -> Safe | Unsafe:
        verdict = await super().look(members)
        if not self.leaving.listed and self.leaving.in_flight == 0:
            return Safe(reason="idle")
        return verdict


class _HastyDeparture(Departure):
    async def look(self, members: Iterable[EndpointRecord]) -> Safe | Unsafe:
        verdict = await super().look(members)
        return verdict if self.leaving.listed else Safe(reason="it gets nothing new")


def _kill_hastily(planner: Planner, kind: type[Departure]) -> None:
    acts = planner._acts
    may_end = acts._may_end

    async def may_end_hastily(component: str, leaving: LeavingWorker, within_s: float) -> bool:
        if leaving.lease_id not in acts._departures:
            worker = worker_of(component, leaving, planner._spec.namespace)
            departure = kind(worker, PROCESS.get().clock.monotonic)
            acts._departures[leaving.lease_id] = departure
        return await may_end(component, leaving, within_s)

    acts._may_end = may_end_hastily


def _kill_on_idle(planner: Planner) -> None:
    """A worker without requests or jobs is ended, even while writes for it or into it may go on."""
    _kill_hastily(planner, _IdleDeparture)


def _kill_with_claims(planner: Planner) -> None:
    """A worker that gets nothing new is ended, whatever it has claimed."""
    _kill_hastily(planner, _HastyDeparture)


class _AlwaysLeads(PlannerRecords):
    @property
    def why_not(self) -> str:
        return ""


def _usurp(planner: Planner) -> None:
    """A planner acts also while another one leads."""
    assert planner._records is not None
    planner._records.__class__ = _AlwaysLeads


def _act_in_dry_run(planner: Planner) -> None:
    """A planner in a dry run acts."""
    if planner._config.dry_run:
        _usurp(planner)
        planner._hold = lambda records, wanted, manual: ""


def _see(planner: Planner, other: Callable[[RoleSeen], RoleSeen]) -> None:
    """Gives it wrong facts about its workers."""
    right = planner._seen

    def wrong(
        records: PlannerRecords,
        observed: Observed,
        counts: Mapping[str, RoleCounts],
        wanted: WantedRecord,
    ) -> Seen:
        seen = right(records, observed, counts, wanted)
        return replace(seen, roles={role: other(one) for role, one in seen.roles.items()})

    planner._seen = wrong


def _see_no_draining(planner: Planner) -> None:
    """The devices of draining workers do not count in the budget."""
    _see(planner, lambda one: replace(one, counts=structs.replace(one.counts, draining=0)))


def _see_all_ready(planner: Planner) -> None:
    """Workers that start or have crashed count as if they served. Any is removed, not only one that
    others can replace."""

    def other(one: RoleSeen) -> RoleSeen:
        ready = one.counts.ready + one.counts.starting
        return replace(one, counts=structs.replace(one.counts, ready=ready, starting=0))

    async def victim(component: str) -> EndpointRecord | None:
        members = planner._observation.members
        fit = (members[i] for i in sorted(members) if members[i].component == component)
        return next((one for one in fit if one.lease_id not in planner._acts._removed), None)

    _see(planner, other)
    planner._acts._victim = victim


def _no_limits(planner: Planner) -> None:
    """The limits of a role do not count, but one worker stays."""
    few, many = {"prefill_min": 1, "decode_min": 1}, {"prefill_max": 8, "decode_max": 8}
    planner._limits = replace(planner._limits, **few, **many)


def _reverse_at_once(planner: Planner) -> None:
    """A change does not wait for the last one, which went the other way."""
    _see(planner, lambda one: replace(one, changed=None))


def _order_before_record(planner: Planner) -> None:
    """A change is written down when its order was taken."""
    edit, order = planner._acts._records.edit, planner._acts._order
    pending: list[WantedEdit] = []

    async def edit_later(change: WantedEdit) -> WantedRecord:
        if change.__name__ == "wanted":
            pending.append(change)
            return change(WantedRecord())
        return await edit(change)

    async def order_and_edit(
        component: str, role: WantedWorkers, chosen: EndpointRecord | None
    ) -> None:
        await order(component, role, chosen)
        while pending:
            await edit(pending.pop())

    planner._acts._records.edit, planner._acts._order = edit_later, order_and_edit


def _planner(violates: str, change: Callable[[Planner], None]) -> Mutant:
    """change: called with each planner that has started."""

    class Changed(Planner):
        async def start(self, host: Host) -> dict[str, Any]:
            facts = await super().start(host)
            change(self)
            return facts

    return Mutant(violates, Shipped(planner=Changed))


#: By the name that the command line takes. Only seeds with planners can find them.
PLANNER_MUTANTS: dict[str, Mutant] = {
    "kills-on-idle-alone": _planner("it may still be written into", _kill_on_idle),
    "kills-with-claims": _planner("may still be written by it", _kill_with_claims),
    "acts-without-leadership": _planner("it does not lead", _usurp),
    "acts-in-dry-run": _planner("it is in a dry run", _act_in_dry_run),
    "draining-costs-nothing": _planner("occupied, and the budget is", _see_no_draining),
    "removes-the-last": _planner("removed, and it is the last one", _see_all_ready),
    "ignores-the-maximum": _planner("are the most", _no_limits),
    "ignores-the-minimum": _planner("are fewer than", _no_limits),
    "reverses-at-once": _planner("a reversal after", _reverse_at_once),
    "orders-before-its-record": _planner("are wanted", _order_before_record),
}

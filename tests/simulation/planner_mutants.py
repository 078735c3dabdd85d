"""Planners that lack one of their safeguards. The simulation must detect each."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from msgspec import structs

from dynamo_lite.planner.connector import COMPONENTS, Counted
from dynamo_lite.planner.departure import Departure, worker_of
from dynamo_lite.planner.observation import Observed
from dynamo_lite.planner.planner import Planner
from dynamo_lite.planner.policy.drain import Safe, Unsafe
from dynamo_lite.planner.policy.inputs import Role, RoleSeen, Seen
from dynamo_lite.planner.records import PlannerRecords
from dynamo_lite.planner.under_way import RunningOperation
from dynamo_lite.protocol.planner import RoleCounts
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
    await_leaving = planner._operations._await_leaving

    async def await_hastily(one: RunningOperation, counted: Counted) -> None:
        if one.departure is None:
            worker = worker_of(one.record, planner._spec.namespace)
            one.departure = kind(worker, PROCESS.get().clock.monotonic)
        await await_leaving(one, counted)

    planner._operations._await_leaving = await_hastily


def _kill_on_idle(planner: Planner) -> None:
    """A worker without requests or jobs is ended, even while writes for it or into it may go on."""
    _kill_hastily(planner, _IdleDeparture)


def _kill_with_claims(planner: Planner) -> None:
    """A worker that gets nothing new is ended, whatever it has claimed."""
    _kill_hastily(planner, _HastyDeparture)


class _AlwaysLeads(PlannerRecords):
    @property
    def leads(self) -> bool:
        return True

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
        planner._hold = lambda manual: ""


def _see(planner: Planner, other: Callable[[RoleSeen], RoleSeen]) -> None:
    """Gives it wrong facts about its workers."""
    right = planner._seen

    def wrong(observed: Observed, number: Counted | None) -> Seen:
        seen = right(observed, number)
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

    async def victim(role: Role) -> EndpointRecord | None:
        members = planner._observation.members
        spared = planner._under_way.victims(members)
        fit = (members[i] for i in sorted(members) if members[i].component == COMPONENTS[role])
        return next((one for one in fit if one.lease_id not in spared), None)

    _see(planner, other)
    planner._victim = victim
    planner._operations._too_few = lambda record, counts: ""


def _no_limits(planner: Planner) -> None:
    """The limits of a role do not count, but one worker stays."""
    few, many = {"prefill_min": 1, "decode_min": 1}, {"prefill_max": 8, "decode_max": 8}
    planner._limits = replace(planner._limits, **few, **many)


def _reverse_at_once(planner: Planner) -> None:
    """A change does not wait for the last one, which went the other way."""
    _see(planner, lambda one: replace(one, changed=None))


def _do_twice(planner: Planner) -> None:
    """A resumed addition starts from the beginning, whatever was ordered before the crash."""
    order_additions, load = planner._operations._order_additions, planner._under_way.load
    resumed: set[int] = set()

    async def note() -> None:
        await load()
        resumed.update(one.record.id for one in planner._under_way)

    async def order_all(one: RunningOperation, counted: Counted, counts: RoleCounts) -> None:
        if one.record.id in resumed:
            counts = RoleCounts(ready=one.record.before)
        await order_additions(one, counted, counts)

    planner._under_way.load, planner._operations._order_additions = note, order_all


def _two_operations(planner: Planner) -> None:
    """A role gets another operation while one is under way."""
    _see_no_draining(planner)
    planner._under_way.of = lambda component: ()


def _order_before_record(planner: Planner) -> None:
    """A change is recorded when its orders were taken."""
    enter = planner._under_way.enter

    async def enter_later(one: RunningOperation, phase: Any) -> None:
        if phase == "ordered":
            one.stored = True
        else:
            await enter(one, phase)

    planner._under_way.enter = enter_later


def _forget_operations(planner: Planner) -> None:
    """A planner that is elected does not resume the operations that another one has begun."""

    async def nothing() -> None:
        planner._under_way.forget()

    planner._under_way.load = nothing


def _go_back(planner: Planner) -> None:
    """An operation that is resumed begins again with its first phase."""
    load = planner._under_way.load

    async def load_from_start() -> None:
        await load()
        for one in planner._under_way:
            await planner._under_way.enter(one, "ordered")

    planner._under_way.load = load_from_start


def _end_early(planner: Planner, kind: str) -> None:
    enter = planner._under_way.enter

    async def enter_and_end(one: RunningOperation, phase: Any) -> None:
        await enter(one, phase)
        if (one.record.kind, phase) == (kind, "asked"):
            await planner._under_way.end(one, "done")

    planner._under_way.enter = enter_and_end


def _delete_additions(planner: Planner) -> None:
    """The record of an addition is deleted when its orders were taken."""
    _end_early(planner, "add")


def _delete_removals(planner: Planner) -> None:
    """The record of a removal is deleted when its order was taken."""
    _end_early(planner, "remove")


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
    "done-twice": _planner("and the operation wanted", _do_twice),
    "two-operations": _planner("has two operations", _two_operations),
    "orders-before-its-record": _planner("no record of an operation", _order_before_record),
    "forgets-operations": _planner("has two operations", _forget_operations),
    "goes-back": _planner("goes back from", _go_back),
    "deletes-additions": _planner("still starts, and its record is deleted", _delete_additions),
    "deletes-removals": _planner("still drains, and its record is deleted", _delete_removals),
}

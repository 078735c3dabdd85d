"""Planners that lack one of their safeguards. The simulation must detect each."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from msgspec import structs

from dynamo_lite.planner.observation import Observed
from dynamo_lite.planner.planner import Planner
from dynamo_lite.planner.policy.inputs import RoleSeen, Seen
from dynamo_lite.planner.record import PlannerRecords, WantedEdit
from dynamo_lite.protocol.planner import RoleCounts, WantedRecord
from dynamo_lite.protocol.records import EndpointRecord
from tests.simulation.shipped import Mutant, Shipped, after_start


class _AlwaysLeads(PlannerRecords):
    @property
    def why_not(self) -> str:
        return ""


def _usurp(planner: Planner) -> None:
    """A planner acts also while another one leads."""
    planner._records.__class__ = _AlwaysLeads


def _act_in_dry_run(planner: Planner) -> None:
    """A planner in a dry run acts."""
    if planner._config.dry_run:
        _usurp(planner)
        planner._hold = lambda wanted, manual: ""


def _see(planner: Planner, other: Callable[[RoleSeen], RoleSeen]) -> None:
    """Gives it wrong facts about its workers."""
    right = planner._seen

    def wrong(observed: Observed, counts: Mapping[str, RoleCounts]) -> Seen:
        seen = right(observed, counts)
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
        members = planner._observer.members
        return next(
            (members[i] for i in sorted(members) if members[i].component == component), None
        )

    _see(planner, other)
    planner._victim = victim


def _no_limits(planner: Planner) -> None:
    """The limits of a role do not count, but one worker stays."""
    few, many = {"prefill_min": 1, "decode_min": 1}, {"prefill_max": 8, "decode_max": 8}
    planner._limits = replace(planner._limits, **few, **many)


def _reverse_at_once(planner: Planner) -> None:
    """A change does not wait for the last one, which went the other way."""
    _see(planner, lambda one: replace(one, changed=None))


def _order_before_record(planner: Planner) -> None:
    """A change is written down when its order was taken."""
    edit, order = planner._records.edit, planner._connector.change
    pending: list[WantedEdit] = []

    async def edit_later(change: WantedEdit) -> None:
        change(WantedRecord())
        pending.append(change)

    async def change_and_edit(
        component: str, count: int, victim: EndpointRecord | None = None
    ) -> None:
        await order(component, count, victim)
        while pending:
            await edit(pending.pop())

    planner._records.edit, planner._connector.change = edit_later, change_and_edit


def _planner(violates: str, change: Callable[[Planner], None]) -> Mutant:
    changed = after_start(Planner, lambda planner, _: change(planner))
    return Mutant(violates, Shipped(planner=changed))


#: By the name that the command line takes. Only seeds with planners can find them.
PLANNER_MUTANTS: dict[str, Mutant] = {
    "acts-without-leadership": _planner("it does not lead", _usurp),
    "acts-in-dry-run": _planner("it is in a dry run", _act_in_dry_run),
    "draining-costs-nothing": _planner("occupied, and the budget is", _see_no_draining),
    "removes-the-last": _planner("removed, and it is the last one", _see_all_ready),
    "ignores-the-maximum": _planner("are the most", _no_limits),
    "ignores-the-minimum": _planner("are fewer than", _no_limits),
    "reverses-at-once": _planner("a reversal after", _reverse_at_once),
    "orders-before-its-record": _planner("are wanted", _order_before_record),
}

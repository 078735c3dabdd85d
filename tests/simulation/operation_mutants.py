"""Planners that lack a safeguard of the changes that are under way. The simulation must detect
each."""

from typing import Any

from dynamo_lite.protocol.planner import RoleCounts
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.planner.connector import Counted
from dynamo_lite.services.planner.planner import Planner
from dynamo_lite.services.planner.under_way import RunningOperation
from tests.simulation.mutant import Mutant
from tests.simulation.planner_mutants import PlannerMutant, SeesNoDraining


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


class _Forgetful(SeesNoDraining):
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


class _ForgetsAll(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)

        async def nothing() -> None:
            self._under_way.forget()

        self._under_way.load = nothing
        return facts


class ForgetsOperations(PlannerMutant):
    """A planner that is elected does not resume the operations that another one has begun."""

    kind = _ForgetsAll


class _StartsAgain(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        load = self._under_way.load

        async def load_from_start() -> None:
            await load()
            for one in self._under_way:
                await self._under_way.enter(one, "ordered")

        self._under_way.load = load_from_start
        return facts


class GoesBack(PlannerMutant):
    """An operation that is resumed begins again with its first phase."""

    kind = _StartsAgain


class _EndsEarly(Planner):
    #: Of the operations that it ends.
    ends: str

    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        enter = self._under_way.enter

        async def enter_and_end(one: RunningOperation, phase: Any) -> None:
            await enter(one, phase)
            if (one.record.kind, phase) == (self.ends, "asked"):
                await self._under_way.end(one, "done")

        self._under_way.enter = enter_and_end
        return facts


class _EndsAdditions(_EndsEarly):
    ends = "add"


class DeletesAdditions(PlannerMutant):
    """The record of an addition is deleted when its orders were taken."""

    kind = _EndsAdditions


class _EndsRemovals(_EndsEarly):
    ends = "remove"


class DeletesRemovals(PlannerMutant):
    """The record of a removal is deleted when its order was taken."""

    kind = _EndsRemovals


#: By the name that the command line takes.
OPERATION_MUTANTS: dict[str, Mutant] = {
    "done-twice": Mutant(DoneTwice, "and the operation wanted"),
    "two-operations": Mutant(TwoOperations, "has two operations"),
    "orders-before-its-record": Mutant(OrdersBeforeItsRecord, "no record of an operation"),
    "forgets-operations": Mutant(ForgetsOperations, "has two operations"),
    "goes-back": Mutant(GoesBack, "goes back from"),
    "deletes-additions": Mutant(DeletesAdditions, "still starts, and its record is deleted"),
    "deletes-removals": Mutant(DeletesRemovals, "still drains, and its record is deleted"),
}

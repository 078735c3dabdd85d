"""Planners and supervisors that lack a safeguard of switches to another role. The simulation must
detect each."""

import dataclasses
from typing import Any

import msgspec

from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.planner.connector import Counted
from dynamo_lite.services.planner.planner import Planner
from dynamo_lite.simulation.graph_switches import SimSwitch, SimSwitches
from dynamo_lite.simulation.graph_worker import Worker
from dynamo_lite.simulation.planner_mutants import PlannerMutant
from dynamo_lite.simulation.shipped import Shipped


class _Amnesic(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)

        async def nothing() -> None:
            self._switching.forget()

        self._switching.load = nothing
        return facts


class ForgetsASwitch(PlannerMutant):
    """A planner that is elected does not resume the switch that another one has begun."""

    kind = _Amnesic


class _Hasty(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        enter = self._switching._enter

        async def enter_later(one: Any, phase: Any) -> None:
            if phase == "ordered":
                one.stored = True
            else:
                await enter(one, phase)

        self._switching._enter = enter_later
        return facts


class SwitchesBeforeItsRecord(PlannerMutant):
    """A switch is recorded when its order was taken."""

    kind = _Hasty


class _CancelsFirst(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        enter = self._switching._enter

        async def enter_unless_withdrawing(one: Any, phase: Any) -> None:
            if phase == "withdrawing":
                one.record = msgspec.structs.replace(one.record, phase=phase)
            else:
                await enter(one, phase)

        self._switching._enter = enter_unless_withdrawing
        return facts


class CancelsBeforeItsRecord(PlannerMutant):
    """A switch is cancelled, and its record does not say so."""

    kind = _CancelsFirst


class _OrdersAgain(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        go_on = self._switching._go_on

        async def order_again(one: Any, counted: Counted) -> None:
            if one.record.phase == "ordered":
                counted = dataclasses.replace(counted, switches=())
            await go_on(one, counted)

        self._switching._go_on = order_again
        return facts


class _NoBook(SimSwitches):
    def begun(self, component: str, lease_id: int, to: str) -> SimSwitch | None:
        return None

    def begin(self, worker: Worker, to: str) -> None:
        self.make(worker, to)


class SwitchesTwice(PlannerMutant):
    """A resumed switch is ordered again, and the supervisor does not know that it was begun."""

    kind = _OrdersAgain
    switches = _NoBook


class _SwitchesOver(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        begin = self._switching.begin

        async def begin_over(*args: Any, **kwargs: Any) -> None:
            self._switching.forget()
            await begin(*args, **kwargs)

        self._switching.begin = begin_over
        self._switching.of = lambda component: ()
        return facts


class SwitchesOverAnother(PlannerMutant):
    """A switch is begun while another one is under way."""

    kind = _SwitchesOver


#: By the name that the command line takes.
SWITCH_MUTANTS: dict[str, type[Shipped]] = {
    "forgets-a-switch": ForgetsASwitch,
    "switches-before-its-record": SwitchesBeforeItsRecord,
    "cancels-before-its-record": CancelsBeforeItsRecord,
    "switches-twice": SwitchesTwice,
    "switches-over-another": SwitchesOverAnother,
}

#: A seed that finds each of them.
FOUND_BY: dict[str, int] = {
    "forgets-a-switch": 69,
    "switches-before-its-record": 19,
    "cancels-before-its-record": 19,
    "switches-twice": 19,
    "switches-over-another": 219,
}

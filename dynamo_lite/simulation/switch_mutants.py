"""Planners and supervisors that lack a safeguard of switches to another role. The simulation must
detect each."""

import dataclasses
from typing import Any

import msgspec

from dynamo_lite.policy.scaling.inputs import RoleSeen
from dynamo_lite.policy.scaling.limits import bounds
from dynamo_lite.policy.scaling.memory import Action, AddWorkers, SwitchWorker
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.planner.connector import COMPONENTS, Counted
from dynamo_lite.services.planner.planner import Planner
from dynamo_lite.simulation.graph_switches import SimSwitch, SimSwitches
from dynamo_lite.simulation.graph_worker import Worker
from dynamo_lite.simulation.mutant import Mutant
from dynamo_lite.simulation.planner_mutants import PicksAny, PlannerMutant


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


class _TakesBeyond(Planner):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        self._true_limits = self._limits
        self._limits = dataclasses.replace(self._limits, prefill_max=8, decode_max=8)
        return facts

    async def _act(self, action: Action, number: Counted) -> bool:
        if isinstance(action, AddWorkers):
            counts = number.roles[COMPONENTS[action.role]]
            most = bounds(self._true_limits, action.role)[1]
            if counts.starting + counts.ready + action.size > most:
                return False
        return await super()._act(action, number)


class SwitchesBeyondTheMaximum(PlannerMutant):
    """A role that takes a worker may have more than its maximum."""

    kind = _TakesBeyond


class _GivesTheLast(PicksAny):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        self._limits = dataclasses.replace(self._limits, prefill_min=0, decode_min=0)
        self._switching._too_few = lambda record, counted: ""
        return facts

    def _other(self, one: RoleSeen) -> RoleSeen:
        # A removal asks for two workers, and is refused later.
        return dataclasses.replace(one, others=1) if one.counts.ready == 1 else one


class SwitchesTheLast(PlannerMutant):
    """A role also gives its last worker."""

    kind = _GivesTheLast


class _AddsToo(Planner):
    async def _act(self, action: Action, number: Counted) -> bool:
        begun = await super()._act(action, number)
        if begun and isinstance(action, SwitchWorker):
            await self._operations.add(COMPONENTS[action.to], 1, number, action.reason)
        return begun


class AddsDuringASwitch(PlannerMutant):
    """The worker that changes its role does not count, and one is added in its new role."""

    kind = _AddsToo


#: By the name that the command line takes.
SWITCH_MUTANTS: dict[str, Mutant] = {
    "forgets-a-switch": Mutant(ForgetsASwitch, "another one is recorded"),
    "switches-before-its-record": Mutant(SwitchesBeforeItsRecord, "and the record says"),
    "cancels-before-its-record": Mutant(CancelsBeforeItsRecord, "and the record is"),
    "switches-twice": Mutant(SwitchesTwice, "twice"),
    "switches-over-another": Mutant(SwitchesOverAnother, "another one is recorded"),
    "switches-beyond-the-maximum": Mutant(SwitchesBeyondTheMaximum, "are more than"),
    "switches-the-last": Mutant(SwitchesTheLast, "switched, and it is the last one"),
    "adds-during-a-switch": Mutant(AddsDuringASwitch, "occupied after a switch"),
}

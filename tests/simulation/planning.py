"""The planners of a simulated cluster, and what happens to them: kills, operators, bad starts."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dynamo_lite.planner.planner import Planner
from dynamo_lite.planner.record import WantedEdit, edit
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import DynamoLiteError, StartupError
from dynamo_lite.protocol.planner import WantedRecord
from dynamo_lite.runtime.process.component import Component, Host, ProcessSpec
from tests.simulation.planner_invariants import PlannerJudge
from tests.simulation.processes import NAMESPACE, Slot
from tests.simulation.scenario import PlannerScenario, Step, Wish
from tests.simulation.supervisor import SLOTS, SimPods, SimSupervisor

if TYPE_CHECKING:
    from tests.simulation.world import World


#: A planner that is killed in a step lives for this time of it, as powers of ten. Orders are taken
#: within some milliseconds.
_KILLED_IN_WANTED, _KILLED_IN_ORDERED = (-3.3, -1.9), (-3.3, -0.3)
_RETRY_S = 1.0
#: After this long a start that hangs ends.
_HANGS_S = 30.0


def _start_badly(component: Component, after_s: float) -> None:
    async def start(host: Host) -> Any:
        await asyncio.sleep(after_s)
        raise StartupError("no memory is free on its device")

    component.start = start


class Planning:
    """To be made and used outside of every simulated process."""

    def __init__(self, world: "World", scenario: PlannerScenario):
        self._world, self._scenario, self._network = world, scenario, world.network
        self._loop, self._etcd = world.loop, world.etcd
        self._rng = world.loop.stream("planning")
        self.supervisor = SimSupervisor(world, scenario.devices)
        self.judge = PlannerJudge(world, scenario, self.supervisor, on_step=self._on_step)
        self.supervisor.watcher = self.judge
        self._etcd.data.on_commit = self.judge.committed
        self._crashes = list(scenario.crashes)
        self._began_at = self._loop.time()
        self._operator = self._loop.add_process("operator")
        self._unset: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._began_at = self._loop.time()
        self.supervisor.listen(self._network)
        for wish in self._scenario.wishes:
            self._loop.call_at(self._began_at + wish.at_s, self._carry_out, wish)

    def planner(self, spec: ProcessSpec) -> Planner:
        scenario = self._scenario
        config = asdict(scenario.options) | {"dry_run": scenario.is_dry(spec.instance)}
        name = f"planner-{spec.instance}"
        pods = SimPods(self.supervisor, self._network, name) if scenario.pods else None
        return self._world.shipped.planner(config, pods)

    def worker(self, slot: Slot, component: Component) -> Component:
        """The component as it starts and ends in this scenario."""
        if slot.component not in SLOTS:
            return component
        now = self._loop.time() - self._began_at
        for bad in self._scenario.bad_starts:
            if bad.from_s <= now < bad.to_s and slot.was_ready is bad.restarts:
                hangs_s = _HANGS_S if bad.hang else 0.0
                _start_badly(component, bad.to_s - now if bad.restarts else hangs_s)
                return component
        if self._scenario.pods:
            # Like one with an engine that ends slowly.
            takes_s, start = self._rng.choice((0.0, 0.5, 3.0)), component.start

            async def start_to_close_slowly(host: Host) -> Any:
                facts = await start(host)
                host.stack.push_async_callback(asyncio.sleep, takes_s)
                return facts

            component.start = start_to_close_slowly
        return component

    def unsettled(self) -> str | None:
        """What is not settled yet; called repeatedly at the end of a run."""
        if manual := self._wanted().manual:
            if self._unset is None or self._unset.done():
                self._unset = self._operator.spawn(self._forget(), name="unset")
            return f"an operator's numbers: {manual}"
        return self.judge.unsettled()

    # kill -9 in a step

    def _on_step(self, step: Step) -> None:
        if step in self._crashes:
            self._crashes.remove(step)
            # In the moment itself an order is taken, and its sender has no answer.
            limits = _KILLED_IN_WANTED if step.endswith("wanted") else _KILLED_IN_ORDERED
            after_s = 10 ** self._rng.uniform(*limits)
            after_s *= self._rng.random() < 0.5
            self._network.call_at(self._loop.time() + after_s, self._kill_leader, step)

    def _kill_leader(self, step: Step) -> None:
        reigns = self.judge.reigns
        for name, slot in self._world.slots.items():
            if not name.startswith("planner") or slot.host is None or slot.process is None:
                continue
            if reigns and slot.host.lease.id == reigns[-1].lease_id:
                self._loop.trace.add(f"FAULT kill -9 of {name} in {step}", "world")
                self.judge.judge.counts[f"planner killed in {step}"] += 1
                slot.process.kill()

    # The operator

    def _carry_out(self, wish: Wish) -> None:
        self._loop.trace.add(f"FAULT {wish}", "world")
        self._operator.spawn(self._set(wish), name=str(wish))

    async def _set(self, wish: Wish) -> None:
        """As `dynamo-lite planner set`."""
        await self._edit(
            lambda record: replace(record, manual={**record.manual, wish.component: wish.count})
        )

    async def _forget(self) -> None:
        await self._edit(lambda record: replace(record, manual={}))
        await asyncio.sleep(_RETRY_S)

    async def _edit(self, change: WantedEdit) -> None:
        """Does nothing while etcd is unavailable."""
        try:
            async with asyncio.timeout(5.0), self._world.open_store() as store:
                await edit(store, NAMESPACE, change)
        except (DynamoLiteError, TimeoutError) as exc:
            self._loop.trace.add(f"the operator was not heard: {exc!r}")

    def _wanted(self) -> WantedRecord:
        key = names.planner_wanted_key(NAMESPACE)
        value = self._etcd.data.matching(key).get(key)
        return WantedRecord() if value is None else decode_json(value, WantedRecord)

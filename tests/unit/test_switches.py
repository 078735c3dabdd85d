"""The devices of a worker that changes its role are reserved for its successor only."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.protocol.errors import Refused, StartupError, UnknownWorker
from dynamo_lite.serve.devices import Devices
from dynamo_lite.serve.fleet import Fleet
from dynamo_lite.serve.progress import Progress
from dynamo_lite.serve.run_state import ProcessState
from dynamo_lite.serve.switches import Switches

D, P = "VllmWorker", "PrefillWorker"


class Instance:
    """As `InstanceSupervisor`, without a process."""

    def __init__(self, service: str, number: int, devices: dict[str, str]):
        self.launch = SimpleNamespace(
            service=service, instance=number, name=f"{service}-{number}", switchable=False
        )
        self.spawned, self.not_kept = self.launch, ""
        self.began_kept, self.change_s = False, 0.0
        self.devices = devices.get("CUDA_VISIBLE_DEVICES", "")
        self.state = ProcessState(service=service, instance=number, lease=f"{id(self):x}")
        self.ready, self.done = asyncio.Event(), asyncio.Event()
        self.leaves = False

    @property
    def took_over(self) -> bool:
        return self.spawned is not self.launch

    @property
    def lease_id(self) -> int:
        return int(self.state.lease, 16)

    @property
    def phase(self) -> str:
        if self.done.is_set():
            return "ended"
        if self.leaves:
            return "draining"
        return "ready" if self.ready.is_set() else "starting"

    def stop(self) -> None:
        self.leaves = True


def service(name: str, workers: int, devices: int) -> Any:
    inner = SimpleNamespace(name=name, scalable=name != "Frontend")
    return SimpleNamespace(
        service=SimpleNamespace(service=inner, workers=workers, devices=devices, fixed_env="")
    )


class World:
    def __init__(self, devices: int = 3, decode_devices: int = 1, prefill_devices: int = 1):
        self.unwritable = False
        tiers = [
            service("Frontend", 1, 0),
            service(D, 1, decode_devices),
            service(P, 2, prefill_devices),
        ]
        names = [f"gpu{number}" for number in range(devices)]
        self.devices = Devices(names)
        self.fleet = Fleet(tiers, self.devices, self._keep)
        self.switches = Switches(self.fleet, Progress())
        for one in self.all():
            one.ready.set()

    def _keep(self, launches: Any, number: int, devices: Any, first_start: Any = None) -> Any:
        if self.unwritable:
            raise OSError(28, "No space left on device")
        return Instance(launches.service.service.name, number, devices)

    def all(self) -> list[Any]:
        return list(self.fleet)

    def of(self, name: str) -> list[Any]:
        return [one for one in self.all() if one.launch.service == name]

    def begin(self, worker: Any, to: str) -> Any:
        switch = self.switches.begin(worker.launch.service, worker.lease_id, to)
        worker.stop()
        return switch


def test_a_graph_whose_files_cannot_be_written_is_not_started():
    class Full(World):
        def _keep(self, launches: Any, number: int, devices: Any, first_start: Any = None) -> Any:
            raise OSError(28, "No space left on device", "plans/Frontend-0.json")

    with pytest.raises(StartupError, match=r"Frontend: its files cannot be written: .*plans/Front"):
        Full()


def test_the_devices_pass_from_one_to_the_other_and_nobody_gets_them_in_between():
    world = World()
    giver = world.of(P)[0]
    held = giver.devices
    switch = world.begin(giver, D)
    for ended in (False, True):
        if ended:
            giver.done.set()
        counts = world.fleet.counts()
        assert sum(one.present for one in counts.values()) == (2 if ended else 3)
        assert counts[D].devices_free == 0
        for component in (D, P):
            with pytest.raises(Refused, match="needs 1 devices, 0 are free"):
                world.fleet.add(component)
    assert world.switches.hand_over(switch, starts=True)
    successor = world.of(D)[1]
    assert (successor.devices, successor.phase) == (held, "starting")
    assert world.fleet.counts()[D].devices_free == 0
    assert world.switches.states()[0].phase == "starting"
    successor.ready.set()
    world.switches.settle(switch)
    assert world.switches.states()[0].phase == "done"
    successor.done.set()
    assert world.fleet.counts()[D].devices_free == 1


@pytest.mark.parametrize("cancelled", [True, False])
def test_without_a_successor_the_devices_are_free_when_the_worker_has_ended(cancelled: bool):
    world = World()
    giver = world.of(P)[0]
    switch = world.begin(giver, D)
    if cancelled:
        assert world.switches.cancel(D, giver.lease_id) is switch
    assert world.fleet.counts()[D].devices_free == 0
    giver.done.set()
    assert not world.switches.hand_over(switch, starts=cancelled)
    world.switches.settle(switch)
    assert world.switches.states()[0].phase == "ended"
    assert world.fleet.counts()[D].devices_free == 1
    assert len(world.of(D)) == 1


def test_a_successor_of_fewer_devices_leaves_the_rest():
    world = World(devices=5, prefill_devices=2)
    giver = world.of(P)[1]
    switch = world.begin(giver, D)
    giver.done.set()
    world.switches.hand_over(switch, starts=True)
    assert world.of(D)[1].devices == "gpu3"
    assert world.fleet.counts()[D].devices_free == 1


def test_one_switch_at_a_time_and_the_same_one_only_once():
    world = World()
    first, second = world.of(P)
    switch = world.begin(first, D)
    assert world.switches.begun(P, first.lease_id, D) is switch
    assert world.switches.begun(P, second.lease_id, D) is None
    with pytest.raises(Refused, match="a switch is under way: PrefillWorker-0 to VllmWorker-1"):
        world.switches.begin(P, second.lease_id, D)
    first.done.set()
    world.switches.hand_over(switch, starts=True)
    world.of(D)[1].ready.set()
    world.switches.settle(switch)
    assert world.switches.begun(P, first.lease_id, D) is switch
    # One that was ready is not its predecessor's any more.
    assert world.switches.cancel(D, first.lease_id) is None
    again = world.begin(second, D)
    assert again.successor.launch.name == "VllmWorker-2"


def test_a_number_is_not_given_twice():
    world = World(devices=4)
    world.begin(world.of(P)[0], D)
    assert world.fleet.add(D).launch.name == "VllmWorker-2"


def test_what_is_refused_changes_nothing():
    world = World(devices=4, decode_devices=2)
    one, other = world.of(P)
    before = world.fleet.counts()
    with pytest.raises(Refused, match="VllmWorker: needs 2 devices, PrefillWorker-0 has 1"):
        world.begin(one, D)
    with pytest.raises(Refused, match="it has this role already"):
        world.begin(one, P)
    with pytest.raises(Refused, match="no service of this graph that can be scaled"):
        world.begin(one, "Frontend")
    with pytest.raises(UnknownWorker):
        world.switches.begin(P, 12345, D)
    other.stop()
    with pytest.raises(Refused, match="PrefillWorker-1: it leaves already"):
        world.begin(other, D)
    other.leaves = False
    world.unwritable = True
    with pytest.raises(Refused, match="PrefillWorker: its files cannot be written"):
        world.switches.begin(D, world.of(D)[0].lease_id, P)
    assert world.fleet.counts() == before
    assert world.switches.states() == []


def test_a_kept_process_is_told_with_how_long_its_engine_took():
    world = World()
    giver = world.of(P)[0]
    switch = world.begin(giver, D)
    assert not switch.keeps
    giver.launch.switchable = switch.successor.launch.switchable = True
    assert switch.keeps
    giver.done.set()
    successor = switch.successor
    successor.spawned = giver.launch
    successor.began_kept, successor.change_s = True, 0.25
    world.switches.hand_over(switch, starts=True)
    successor.ready.set()
    world.switches.settle(switch)
    (state,) = world.switches.states()
    assert (state.phase, state.level, state.change_s, state.not_kept) == ("done", 2, 0.25, "")


def test_a_process_that_could_not_go_on_is_replaced_and_the_reason_is_told():
    world = World()
    giver = world.of(P)[0]
    switch = world.begin(giver, D)
    giver.launch.switchable = switch.successor.launch.switchable = True
    giver.done.set()
    giver.not_kept = "the engine is not kept: silent"
    world.switches.hand_over(switch, starts=True)
    (state,) = world.switches.states()
    assert (state.phase, state.level, state.not_kept) == ("starting", 1, giver.not_kept)


@pytest.mark.parametrize("kept", [True, False])
def test_what_becomes_of_a_worker_in_its_next_switch_is_not_told_of_the_one_before(kept: bool):
    world = World()
    giver = world.of(P)[0]
    first = world.begin(giver, D)
    giver.launch.switchable = first.successor.launch.switchable = True
    giver.done.set()
    if kept:
        first.successor.spawned, first.successor.began_kept = giver.launch, True
    else:
        giver.not_kept = "told to fail"
    world.switches.hand_over(first, starts=True)
    first.successor.ready.set()
    world.switches.settle(first)
    second = world.begin(first.successor, P)
    second.successor.launch.switchable = True
    first.successor.not_kept = "the engine is not kept: silent"
    assert [(state.level, state.not_kept) for state in world.switches.states()] == [
        (2, "") if kept else (1, "told to fail"),
        (1, "the engine is not kept: silent"),
    ]


def test_the_number_of_a_process_that_writes_on_into_its_log_is_not_given_to_another():
    world = World()
    giver = world.of(P)[1]
    switch = world.begin(giver, D)
    giver.done.set()
    switch.successor.spawned = giver.launch
    world.switches.hand_over(switch, starts=True)
    world.switches.settle(switch)
    again = world.switches.begin(D, world.of(D)[0].lease_id, P).successor
    assert again.launch.name == "PrefillWorker-2"

"""Which processes may be added, and which device each of them gets."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.protocol.errors import Refused, StartupError
from dynamo_lite.serve.devices import Devices
from dynamo_lite.serve.fleet import Fleet
from dynamo_lite.serve.run_state import ProcessState

D, P = "VllmWorker", "PrefillWorker"


class Instance:
    """As `InstanceSupervisor`, without a process."""

    def __init__(self, service: str, number: int, devices: dict[str, str]):
        self.launch = SimpleNamespace(service=service, instance=number, name=f"{service}-{number}")
        self.devices = devices.get("CUDA_VISIBLE_DEVICES", "")
        self.state = ProcessState(service=service, instance=number, lease=f"{id(self):x}")
        self.done = asyncio.Event()
        self.leaves = False

    @property
    def lease_id(self) -> int:
        return int(self.state.lease, 16)

    @property
    def phase(self) -> str:
        if self.done.is_set():
            return "ended"
        return "draining" if self.leaves else "ready"


def service(name: str, workers: int, devices: int) -> Any:
    inner = SimpleNamespace(name=name, scalable=name != "Frontend")
    return SimpleNamespace(
        service=SimpleNamespace(service=inner, workers=workers, devices=devices, fixed_env="")
    )


class World:
    def __init__(self, devices: int = 3, decode_devices: int = 1):
        self.unwritable = False
        tiers = [service("Frontend", 1, 0), service(D, 1, decode_devices), service(P, 2, 1)]
        self.fleet = Fleet(tiers, Devices([f"gpu{n}" for n in range(devices)]), self._keep)

    def _keep(self, launches: Any, number: int, devices: dict[str, str]) -> Any:
        if self.unwritable:
            raise OSError(28, "No space left on device")
        return Instance(launches.service.service.name, number, devices)

    def of(self, name: str) -> list[Any]:
        return [one for one in self.fleet if one.launch.service == name]


def test_a_graph_whose_files_cannot_be_written_is_not_started():
    class Full(World):
        def _keep(self, launches: Any, number: int, devices: dict[str, str]) -> Any:
            raise OSError(28, "No space left on device", "plans/Frontend-0.json")

    with pytest.raises(StartupError, match=r"Frontend: its files cannot be written: .*plans/Front"):
        Full()


def test_a_device_is_free_for_any_role_when_its_worker_has_ended_and_not_before():
    world = World()
    giver = world.of(P)[0]
    giver.leaves = True
    counts = world.fleet.counts()
    assert sum(one.present for one in counts.values()) == 3
    assert (counts[P].draining, counts[D].devices_free) == (1, 0)
    for component in (D, P):
        with pytest.raises(Refused, match="needs 1 devices, 0 are free"):
            world.fleet.add(component)
    giver.done.set()
    assert world.fleet.counts()[D].devices_free == 1
    added: Any = world.fleet.add(D)
    assert (added.launch.name, added.devices) == ("VllmWorker-1", giver.devices)
    counts = world.fleet.counts()
    assert sum(one.present for one in counts.values()) == 3
    assert (counts[P].present, counts[D].present, counts[D].devices_free) == (1, 2, 0)


def test_the_number_of_one_that_drains_is_not_given_to_another():
    world = World(devices=5)
    leaver = world.of(P)[0]
    leaver.leaves = True
    assert world.fleet.add(P).launch.name == "PrefillWorker-2"
    leaver.done.set()
    assert world.fleet.add(P).launch.name == "PrefillWorker-0"


def test_what_is_refused_changes_nothing():
    world = World(devices=5, decode_devices=2)
    before = world.fleet.counts()
    with pytest.raises(Refused, match="VllmWorker: needs 2 devices, 1 are free"):
        world.fleet.add(D)
    with pytest.raises(Refused, match="no service of this graph that can be scaled"):
        world.fleet.add("Frontend")
    with pytest.raises(Refused):
        world.fleet.to_retire(P, 12345)
    world.unwritable = True
    with pytest.raises(Refused, match="PrefillWorker: its files cannot be written"):
        world.fleet.add(P)
    assert world.fleet.counts() == before


def test_devices_are_handed_out_in_order_and_a_number_is_only_counted():
    devices = Devices((0, "GPU-b", 2))
    first = devices.take(2)
    assert first == ("0", "GPU-b")
    assert devices.environment(first) == {"CUDA_VISIBLE_DEVICES": "0,GPU-b"}
    assert (devices.take(2), devices.free) == (None, 1)
    # One that needs none sees all that the host has.
    assert devices.take(0) == () and devices.environment(()) == {}
    devices.put_back(first)
    assert devices.take(3) == ("0", "GPU-b", "2")
    counted = Devices(2)
    taken = counted.take(1)
    assert taken is not None and counted.environment(taken) == {}
    assert (counted.free, counted.take(2)) == (1, None)


def test_no_device_is_handed_out_twice_or_lost():
    rng = random.Random(5)
    devices = Devices(range(8))
    held: list[tuple[str, ...]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            devices.put_back(held.pop(rng.randrange(len(held))))
        elif (taken := devices.take(rng.randrange(4))) is not None:
            held.append(taken)
        names = [name for taken in held for name in taken]
        assert len(set(names)) == len(names)
        assert devices.free == 8 - len(names)

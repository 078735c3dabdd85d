"""Which processes may be added, and which device each of them gets."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.protocol.errors import Refused, StartupError
from dynamo_lite.runtime.process.stop import StopRequest
from dynamo_lite.serve.progress import Progress
from dynamo_lite.serve.run_state import ProcessState
from dynamo_lite.serve.supervisor import Supervisor

D, P = "VllmWorker", "PrefillWorker"


class Instance:
    """As `InstanceSupervisor`, without a process."""

    def __init__(self, service: str, number: int, devices: tuple[str, ...]):
        name = f"{service}-{number}"
        self.launch = SimpleNamespace(service=service, instance=number, name=name, devices=devices)
        self.state = ProcessState(service=service, instance=number, lease=f"{id(self):x}")
        self.phase = "ready"

    @property
    def lease_id(self) -> int:
        return int(self.state.lease, 16)


def service(name: str, workers: int, devices: int) -> Any:
    inner = SimpleNamespace(name=name, scalable=name != "Frontend")
    return SimpleNamespace(service=inner, workers=workers, devices=devices)


class World(Supervisor):
    """Of processes that do not run."""

    def __init__(self, devices: int = 3, decode_devices: int = 1, prefill: int = 2):
        self.unwritable = False
        tiers = [service("Frontend", 1, 0), service(D, 1, decode_devices), service(P, prefill, 1)]
        shared, names = SimpleNamespace(grace_s=1.0), [f"gpu{n}" for n in range(devices)]
        request: Any = SimpleNamespace(config=SimpleNamespace(shared=shared, devices=names))
        run: Any = SimpleNamespace(etcd="", folder=None)
        stop, force = StopRequest(), asyncio.Event()
        super().__init__(request, tiers, [], Path(), run, stop, force, Progress())

    def _keeper(self, service: Any, number: int, devices: tuple[str, ...]) -> Any:
        if self.unwritable:
            raise OSError(28, "No space left on device")
        return Instance(service.service.name, number, devices)

    def of(self, name: str) -> list[Any]:
        return [one for one in self.instances if one.launch.service == name]


def test_a_graph_whose_files_cannot_be_written_is_not_started():
    class Full(World):
        def _keeper(self, service: Any, number: int, devices: tuple[str, ...]) -> Any:
            raise OSError(28, "No space left on device", "plans/Frontend-0.json")

    with pytest.raises(StartupError, match=r"Frontend: its files cannot be written: .*plans/Front"):
        Full()


def test_a_device_is_free_for_any_role_when_its_worker_has_ended_and_not_before():
    world = World()
    giver = world.of(P)[0]
    giver.phase = "draining"
    counts = world.counts()
    assert sum(one.present for one in counts.values()) == 3
    assert (counts[P].draining, counts[D].devices_free) == (1, 0)
    for component in (D, P):
        with pytest.raises(Refused, match="needs 1 devices, 0 are free"):
            world._add(component)
    giver.phase = "ended"
    assert world.counts()[D].devices_free == 1
    added: Any = world._add(D)
    assert (added.launch.name, added.launch.devices) == ("VllmWorker-1", giver.launch.devices)
    counts = world.counts()
    assert sum(one.present for one in counts.values()) == 3
    assert (counts[P].present, counts[D].present, counts[D].devices_free) == (1, 2, 0)


def test_the_number_of_one_that_drains_is_not_given_to_another():
    world = World(devices=5)
    leaver = world.of(P)[0]
    leaver.phase = "draining"
    assert world._add(P).launch.name == "PrefillWorker-2"
    leaver.phase = "ended"
    assert world._add(P).launch.name == "PrefillWorker-0"


def test_what_is_refused_changes_nothing():
    world = World(devices=5, decode_devices=2)
    before = world.counts()
    with pytest.raises(Refused, match="VllmWorker: needs 2 devices, 1 are free"):
        world._add(D)
    with pytest.raises(Refused, match="no service of this graph that can be scaled"):
        world._number("Frontend")
    with pytest.raises(Refused):
        world._to_retire(P, 99, [12345])
    world.unwritable = True
    with pytest.raises(Refused, match="PrefillWorker: its files cannot be written"):
        world._add(P)
    assert world.counts() == before


def test_devices_are_handed_out_in_order_and_one_that_needs_none_has_none():
    world = World(devices=4, decode_devices=2)
    assert [one.launch.devices for one in world.instances] == [
        *((), ("gpu0", "gpu1"), ("gpu2",), ("gpu3",))
    ]
    world.of(D)[0].phase = "ended"
    assert world._add(P).launch.devices == ("gpu0",)

"""The processes of a running graph: which there are, and the devices that they occupy.

Processes of scalable services can be added and retired while the graph runs. This module
decides whether that is possible and does the bookkeeping; `supervisor.py` runs the processes.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from dynamo_lite.protocol.errors import Refused, StartupError, UnknownWorker
from dynamo_lite.protocol.planner import RoleCounts
from dynamo_lite.serve.devices import Devices
from dynamo_lite.serve.instance_supervisor import FirstStart, InstanceSupervisor
from dynamo_lite.serve.launches import Launches

#: A limit on mistakes: a scale order with too many digits must not fill the process table.
MAX_INSTANCES = 1000


class Keep(Protocol):
    """Makes the supervisor of one process from its service, number and device variables.

    first_start: None: depends on the graph's state. Raises OSError when its files cannot be
    written.
    """

    def __call__(
        self,
        launches: Launches,
        number: int,
        devices: dict[str, str],
        first_start: FirstStart | None = None,
    ) -> InstanceSupervisor: ...


class Fleet:
    """tiers: one service each, in drain order.

    Raises StartupError when the devices do not suffice for the processes of the start, or their
    files cannot be written.
    """

    def __init__(self, tiers: Sequence[Launches], devices: Devices, keep: Keep):
        self._devices = devices
        self._keep = keep
        self._tiers: dict[str, list[InstanceSupervisor]] = {}
        self._launches = {tier.service.service.name: tier for tier in tiers}
        self._occupied: dict[InstanceSupervisor, tuple[str, ...]] = {}
        #: Maps workers to the processes that get their devices when the workers have ended.
        self._successors: dict[InstanceSupervisor, InstanceSupervisor] = {}
        for name, launches in self._launches.items():
            self._tiers[name] = []
            for number in range(launches.service.workers):
                try:
                    entered = self._enter(name, number)
                except OSError as exc:
                    raise StartupError(_unwritten(name, exc).reason) from exc
                if entered is None:
                    raise StartupError(f"{name}: {self._no_device(name)}")

    def __iter__(self) -> Iterator[InstanceSupervisor]:
        return (instance for tier in self._tiers.values() for instance in tier)

    def tiers(self) -> list[list[InstanceSupervisor]]:
        """In drain order."""
        return [list(tier) for tier in self._tiers.values()]

    def names(self, instances: Sequence[InstanceSupervisor] | None = None) -> list[str]:
        return [one.launch.name for one in (self if instances is None else instances)]

    def counts(self) -> dict[str, RoleCounts]:
        """The numbers of processes of the scalable services."""
        self._free_devices()
        return {name: self._counts(name) for name in self._scalable()}

    def add(self, component: str) -> InstanceSupervisor:
        """Enters one more process. Raises Refused, which says what is accepted."""
        launches = self._scalable_one(component)
        self._free_devices()
        number = self._free_number(component, launches)
        try:
            instance = self._enter(component, number)
        except OSError as exc:
            raise _unwritten(component, exc) from exc
        if instance is None:
            raise _refused(f"{component}: {self._no_device(component)}")
        return instance

    def promise(
        self, component: str, lease_id: int, to: str
    ) -> tuple[InstanceSupervisor, InstanceSupervisor]:
        """Returns a worker, and the process of another component that gets its devices when it has
        ended.

        Until `hand_over` or `break_promise` no other process gets them. Raises Refused.
        """
        self._scalable_one(component)
        launches = self._scalable_one(to)
        if component == to:
            raise _refused(f"{to}: it has this role already")
        worker = self.to_retire(component, lease_id)
        if worker.phase != "ready":
            raise _refused(f"{worker.launch.name}: it leaves already")
        need, has = launches.service.devices, self._occupied[worker]
        if need > len(has):
            raise _refused(f"{to}: needs {need} devices, {worker.launch.name} has {len(has)}")
        number = self._free_number(to, launches)
        devices = self._devices.environment(has[:need])
        try:
            successor = self._keep(launches, number, devices, "again")
        except OSError as exc:
            raise _unwritten(to, exc) from exc
        self._successors[worker] = successor
        return worker, successor

    def hand_over(self, worker: InstanceSupervisor) -> None:
        """The worker has ended: its successor is entered, with its devices."""
        successor, devices = self._successors.pop(worker), self._occupied.pop(worker)
        need = self._launches[successor.launch.service].service.devices
        self._devices.put_back(devices[need:])
        self._list(successor, devices[:need])

    def break_promise(self, worker: InstanceSupervisor) -> None:
        """No successor is entered. The devices are free when the worker has ended."""
        self._successors.pop(worker)

    def to_retire(self, component: str, lease_id: int) -> InstanceSupervisor:
        """The process to retire. It may have ended already. Raises Refused if there is none.

        lease_id: of the process; 0: the youngest one that is restarted after a crash, or else the
            youngest one that was never ready.
        """
        self._scalable_one(component)
        tier = self._tiers[component]
        if lease_id == 0:
            crashed = [one for one in tier if one.phase == "ready" and not one.lease_id]
            starting = [one for one in tier if one.phase == "starting"]
            if not (found := crashed or starting):
                raise _refused(f"{component}: no process is starting")
            return found[-1]
        for one in tier:
            if one.lease_id == lease_id:
                return one
        known = ", ".join(one.state.lease for one in tier if one.lease_id) or "none"
        raise UnknownWorker(f"{component}: no process has lease {lease_id:x}; leases: {known}")

    def _enter(self, name: str, number: int) -> InstanceSupervisor | None:
        """None when too few devices are free. Raises OSError when its files cannot be written."""
        launches = self._launches[name]
        devices = self._devices.take(launches.service.devices)
        if devices is None:
            return None
        try:
            instance = self._keep(launches, number, self._devices.environment(devices))
        except OSError:
            self._devices.put_back(devices)
            raise
        self._list(instance, devices)
        return instance

    def _list(self, instance: InstanceSupervisor, devices: tuple[str, ...]) -> None:
        name, number = instance.launch.service, instance.launch.instance
        # The last process with this number has ended, and its log was overwritten.
        self._tiers[name] = [one for one in self._tiers[name] if one.launch.instance != number]
        self._tiers[name].append(instance)
        self._occupied[instance] = devices

    def _free_number(self, component: str, launches: Launches) -> int:
        """Raises Refused when no process can be added."""
        if why := launches.service.fixed_env:
            raise _refused(f"{component}: {why}")
        tier = [one for one in self._tiers[component] if not one.done.is_set()]
        promised = [o for o in self._successors.values() if o.launch.service == component]
        # A process that has changed its role keeps the log that it was started with.
        spawned = [one.spawned for one in self if not one.done.is_set()]
        logs = {one.instance for one in spawned if one.service == component}
        present = {one.launch.instance for one in (*tier, *promised)} | logs
        if len(present) >= MAX_INSTANCES:
            raise _refused(f"{component}: {MAX_INSTANCES} processes run, which is the most")
        return next(n for n in range(MAX_INSTANCES) if n not in present)

    def _free_devices(self) -> None:
        ended = [one for one in self._occupied if one.done.is_set()]
        for instance in [one for one in ended if one not in self._successors]:
            self._devices.put_back(self._occupied.pop(instance))

    def _scalable(self) -> list[str]:
        return [name for name, one in self._launches.items() if one.service.service.scalable]

    def _scalable_one(self, component: str) -> Launches:
        accepted = self._scalable()
        if component not in accepted:
            can = ", ".join(accepted) or "none"
            raise _refused(f"{component}: no service of this graph that can be scaled: {can}")
        return self._launches[component]

    def _counts(self, name: str) -> RoleCounts:
        phases = [one.phase for one in self._tiers[name]]
        return RoleCounts(
            starting=phases.count("starting"),
            ready=phases.count("ready"),
            draining=phases.count("draining"),
            devices_each=self._launches[name].service.devices,
            devices_free=self._devices.free,
        )

    def _no_device(self, name: str) -> str:
        need = self._launches[name].service.devices
        return (
            f"needs {need} devices, {self._devices.free} are free; set Graph.devices, or retire"
            " a process first"
        )


def _unwritten(component: str, exc: OSError) -> Refused:
    return _refused(f"{component}: its files cannot be written: {exc}")


def _refused(reason: str) -> Refused:
    return Refused(reason, elsewhere=False)

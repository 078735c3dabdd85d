"""The processes of a running graph: which there are, and the devices that they occupy.

Processes of scalable services can be added and retired while the graph runs. This module
decides whether that is possible and does the bookkeeping; `supervisor.py` runs the processes.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from dynamo_lite.protocol.errors import Refused, StartupError
from dynamo_lite.protocol.planner import RoleCounts
from dynamo_lite.serve.config import ServiceConfig
from dynamo_lite.serve.instance_supervisor import InstanceSupervisor

#: Makes the supervisor of one process from its service, number and devices. Raises OSError when its
#: files cannot be written.
Keep = Callable[[ServiceConfig, int, tuple[str, ...]], InstanceSupervisor]


class Fleet:
    """services: in drain order. devices: see `GraphConfig.devices`.

    Raises StartupError when the devices do not suffice for the processes of the start, or their
    files cannot be written.
    """

    def __init__(self, services: Sequence[ServiceConfig], devices: Sequence[str], keep: Keep):
        self._devices = tuple(devices)
        self._keep = keep
        self._services = {service.service.name: service for service in services}
        self._tiers: dict[str, list[InstanceSupervisor]] = {name: [] for name in self._services}
        for name, service in self._services.items():
            for number in range(service.workers):
                try:
                    self._enter(name, number)
                except Refused as exc:
                    raise StartupError(exc.reason) from exc

    def __iter__(self) -> Iterator[InstanceSupervisor]:
        return (instance for tier in self._tiers.values() for instance in tier)

    def tiers(self) -> list[list[InstanceSupervisor]]:
        """In drain order."""
        return [list(tier) for tier in self._tiers.values()]

    def counts(self) -> dict[str, RoleCounts]:
        return {name: self._counts(name) for name in self._scalable()}

    def add(self, component: str) -> InstanceSupervisor:
        """Enters one more process. Raises Refused, which says what is accepted."""
        self.number(component)
        present = {one.launch.instance for one in self._tiers[component] if not one.done.is_set()}
        return self._enter(component, next(n for n in itertools.count() if n not in present))

    def number(self, component: str) -> int:
        """Its processes, without draining ones. Raises as `add`."""
        if component not in (accepted := self._scalable()):
            can = ", ".join(accepted) or "none"
            raise _refused(f"{component}: no service of this graph that can be scaled: {can}")
        counts = self._counts(component)
        return counts.starting + counts.ready

    def to_retire(
        self, component: str, number: int, leases: Sequence[int]
    ) -> list[InstanceSupervisor]:
        """Processes with these leases, then those that were never ready, the youngest first, then
        those that are restarted after a crash. Raises Refused if there are fewer than `number`."""
        tier = self._tiers[component]
        known = {one.lease_id: one for one in tier if one.lease_id}
        found = [known[lease] for lease in leases if lease in known]
        found += [one for one in reversed(tier) if one.phase == "starting"]
        found += [one for one in reversed(tier) if one.phase == "ready" and not one.lease_id]
        if len(found) < number:
            have = ", ".join(f"{lease:x}" for lease in known) or "none"
            raise _refused(
                f"{component}: no other process is starting or was named; leases: {have}"
            )
        return found[: max(number, 0)]

    def _enter(self, name: str, number: int) -> InstanceSupervisor:
        """Raises Refused when too few devices are free, or its files cannot be written."""
        service = self._services[name]
        need = service.devices
        if need > len(free := self._free()):
            raise _refused(
                f"{name}: needs {need} devices, {len(free)} are free; set Graph.devices,"
                " or retire a process first"
            )
        try:
            instance = self._keep(service, number, free[:need])
        except OSError as exc:
            raise _refused(f"{name}: its files cannot be written: {exc}") from exc
        # The last process with this number has ended, and its log was overwritten.
        self._tiers[name] = [one for one in self._tiers[name] if one.launch.instance != number]
        self._tiers[name].append(instance)
        return instance

    def _free(self) -> tuple[str, ...]:
        """The devices that no process occupies which has not ended."""
        occupied = {name for one in self if not one.done.is_set() for name in one.launch.devices}
        return tuple(name for name in self._devices if name not in occupied)

    def _scalable(self) -> list[str]:
        return [name for name, one in self._services.items() if one.service.scalable]

    def _counts(self, name: str) -> RoleCounts:
        tier = self._tiers[name]
        phases = [one.phase for one in tier]
        return RoleCounts(
            starting=phases.count("starting"),
            ready=phases.count("ready"),
            draining=phases.count("draining"),
            devices_each=self._services[name].devices,
            devices_free=len(self._free()),
            leases=tuple(one.lease_id for one in tier if one.lease_id and one.phase != "ended"),
        )


def _refused(reason: str) -> Refused:
    return Refused(reason, elsewhere=False)

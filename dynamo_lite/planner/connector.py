"""Who starts and removes workers: the seam, and the supervisor of the graph on this host."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.planner import Counts, RoleCounts, SupervisorRequest, Want
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.supervisor_client import order

#: Role to its component.
COMPONENTS: Mapping[Role, str] = {Role.PREFILL: "PrefillWorker", Role.DECODE: "VllmWorker"}
ROLES: Mapping[str, Role] = {name: role for role, name in COMPONENTS.items()}


def by_role(devices: Mapping[str, int]) -> dict[Role, int]:
    """devices: of one worker, by component."""
    return {role: devices[name] for role, name in COMPONENTS.items() if name in devices}


_TIMEOUT_S = 3.0


class Connector(Protocol):
    """Each call raises Refused when it is not possible, and another DynamoLiteError when it is not
    known whether it was done."""

    #: Whether `change` drains and ends exactly the worker that it is given. If not (Kubernetes
    #: chooses), that worker's lease is revoked first, and the number changes when it has drained.
    chooses_victim: bool

    async def counts(self) -> Mapping[str, RoleCounts]:
        """The numbers of workers, by component."""
        ...

    async def change(self, component: str, count: int, lease_id: int = 0) -> None:
        """From now on there are `count` workers, without draining ones. lease_id: the one to
        remove; 0: only those that do not serve."""
        ...

    async def prefer(self, worker: EndpointRecord, *, ends: bool = True) -> None:
        """Whether this is the one that the next removal should end."""
        ...

    def owns(self, worker: EndpointRecord) -> bool:
        """Whether this worker can be removed here."""
        ...


class LocalConnector:
    """The supervisor of the graph on this host. state_dir: of the graph."""

    chooses_victim = True

    def __init__(self, state_dir: Path):
        self._state_dir = state_dir
        self._leases: set[int] = set()
        #: Of the numbers that were seen last. The supervisor refuses what was decided on others.
        self._version = 0

    async def counts(self) -> Mapping[str, RoleCounts]:
        return await self._ask(Counts())

    async def change(self, component: str, count: int, lease_id: int = 0) -> None:
        version = self._version
        await self._ask(Want(component=component, count=count, lease_id=lease_id, version=version))

    async def prefer(self, worker: EndpointRecord, *, ends: bool = True) -> None:
        """Each change names its worker."""

    def owns(self, worker: EndpointRecord) -> bool:
        return worker.lease_id in self._leases

    async def _ask(self, request: SupervisorRequest) -> Mapping[str, RoleCounts]:
        reply = await order(self._state_dir, request, _TIMEOUT_S)
        self._version = reply.version
        self._leases = {lease for each in reply.counts.values() for lease in each.leases}
        return reply.counts

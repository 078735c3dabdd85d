"""Who starts and removes workers: the seam, and the supervisor of the graph on this host."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from dynamo_lite.protocol.planner import Counts, RoleCounts, SupervisorRequest, Want
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.supervisor_client import order

_TIMEOUT_S = 3.0


class Connector(Protocol):
    """Each call raises Refused when it is not possible, and another DynamoLiteError when it is not
    known whether it was done."""

    async def counts(self) -> Mapping[str, RoleCounts]:
        """The numbers of workers, by component."""
        ...

    async def change(
        self, component: str, count: int, victim: EndpointRecord | None = None
    ) -> None:
        """From now on there are `count` workers, without draining ones; those that are too many
        drain. victim: the one to remove; None: only those that do not serve."""
        ...

    def owns(self, worker: EndpointRecord) -> bool:
        """Whether this worker can be removed here."""
        ...


class LocalConnector:
    """The supervisor of the graph on this host. state_dir: of the graph."""

    def __init__(self, state_dir: Path):
        self._state_dir = state_dir
        self._leases: set[int] = set()
        #: Of the numbers that were seen last. The supervisor refuses what was decided on others.
        self._version = 0

    async def counts(self) -> Mapping[str, RoleCounts]:
        return await self._ask(Counts())

    async def change(
        self, component: str, count: int, victim: EndpointRecord | None = None
    ) -> None:
        leases, version = () if victim is None else (victim.lease_id,), self._version
        await self._ask(Want(component=component, count=count, leases=leases, version=version))

    def owns(self, worker: EndpointRecord) -> bool:
        return worker.lease_id in self._leases

    async def _ask(self, request: SupervisorRequest) -> Mapping[str, RoleCounts]:
        reply = await order(self._state_dir, request, _TIMEOUT_S)
        self._version = reply.version
        self._leases = {lease for each in reply.counts.values() for lease in each.leases}
        return reply.counts

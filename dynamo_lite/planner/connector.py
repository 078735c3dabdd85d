"""Who starts and removes workers: the seam, and the supervisor of the graph on this host."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.planner import (
    Add,
    Counts,
    Remove,
    RoleCounts,
    SupervisorReply,
    SupervisorRequest,
)
from dynamo_lite.runtime.supervisor_client import SupervisorClient

#: Role to its component.
COMPONENTS: Mapping[Role, str] = {Role.PREFILL: "PrefillWorker", Role.DECODE: "VllmWorker"}


def by_role(devices: Mapping[str, int]) -> dict[Role, int]:
    """devices: of one worker, by component."""
    return {role: devices[name] for role, name in COMPONENTS.items() if name in devices}


_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Counted:
    """The numbers of workers by component, of one moment."""

    roles: Mapping[str, RoleCounts]
    #: The highest version of any order; 0 if none is known.
    version: int = 0


@dataclass(frozen=True, kw_only=True)
class Order:
    """One worker more, or one less."""

    component: str
    #: Higher than that of every order before.
    version: int
    #: Workers of the component, without draining ones, after this order.
    count: int
    #: Of a removal: the worker; 0: a starting one.
    lease_id: int = 0
    #: Its host.
    host: str = ""


class Connector(Protocol):
    """Each call raises Refused when the order is not possible (UnknownWorker when no order that
    names this worker is), and another DynamoLiteError when it is not known whether the order was
    taken."""

    #: Whether the planner's choice is certain: `remove` drains and ends exactly the worker that it
    #: is given. If not (Kubernetes chooses), the worker's lease is revoked first, and `remove`
    #: follows when it has drained.
    chooses_victim: bool

    async def counts(self) -> Counted: ...

    async def add(self, order: Order) -> None: ...

    async def prefer(self, order: Order) -> None:
        """The worker is the one that the next removal should end."""
        ...

    async def remove(self, order: Order) -> None: ...

    def removable(self, component: str, hosts: Collection[str]) -> Collection[str]:
        """Those of the hosts of a component's workers from which one can be removed."""
        ...


class LocalConnector:
    """The supervisor of the graph on this host. state_dir: of the graph."""

    chooses_victim = True

    def __init__(self, state_dir: Path):
        self._state_dir = state_dir

    async def counts(self) -> Counted:
        reply = await self._ask(Counts())
        return Counted(reply.counts, reply.version)

    async def add(self, order: Order) -> None:
        await self._ask(Add(component=order.component, version=order.version))

    async def prefer(self, order: Order) -> None:
        """The order to remove it names it."""

    async def remove(self, order: Order) -> None:
        request = Remove(component=order.component, lease_id=order.lease_id, version=order.version)
        await self._ask(request)

    def removable(self, component: str, hosts: Collection[str]) -> Collection[str]:
        """The supervisor refuses workers that are not its own."""
        return hosts

    async def _ask(self, request: SupervisorRequest) -> SupervisorReply:
        async with SupervisorClient(self._state_dir, _TIMEOUT_S) as client:
            return await client.order(request)

"""A connector that does not choose which worker ends, as Kubernetes with a Deployment."""

import asyncio
from collections.abc import Collection

from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.services.planner.connector import Counted, Order
from tests.simulation.graph_supervisor import SimSupervisor, Worker
from tests.simulation.network.network import Network


class SimPods:
    """Implements Connector for the planner `who`. A request and its answer take the network's
    time each, so that a planner may end between the two."""

    chooses_victim = False

    def __init__(self, supervisor: SimSupervisor, network: Network, who: str):
        self._supervisor, self._network, self._who = supervisor, network, who

    async def counts(self) -> Counted:
        await self._way()
        counts = self._supervisor.counts()
        await self._way()
        return Counted(counts, self._supervisor.orders.version)

    async def add(self, order: Order) -> None:
        await self._way()
        counts = self._supervisor.counts()[order.component]
        if counts.starting + counts.ready < order.count:
            self._supervisor.add(self._who, order.component)
        await self._way()

    async def prefer(self, order: Order) -> None:
        """Remembers the pod by its process. When the container was restarted, the pod is still
        the preferred one."""
        await self._way()
        worker = self._supervisor.find(order.component, order.lease_id)
        worker.last_lease = order.lease_id
        await self._way()

    async def remove(self, order: Order) -> None:
        """Ends the preferred one: with SIGKILL, if it is still the process that drains."""
        await self._way()
        counts = self._supervisor.counts()[order.component]
        if counts.starting + counts.ready > order.count:
            worker = self._supervisor.find(order.component, order.lease_id)
            if worker.phase in ("starting", "ready"):
                self._end(worker, order.lease_id)
        await self._way()

    def _end(self, worker: Worker, lease_id: int) -> None:
        host = worker.slot.host
        if lease_id and host is not None and host.lease.id == lease_id:
            self._supervisor.kill(self._who, worker)
        else:
            self._supervisor.end(worker)

    def removable(self, component: str, hosts: Collection[str]) -> Collection[str]:
        return hosts

    def ends_unready_first(self, component: str) -> bool:
        return True

    async def _way(self) -> None:
        """Raises Unavailable."""
        if self._network.is_cut(self._who, "supervisor"):
            await asyncio.sleep(1.0)
            raise Unavailable("the API server does not answer")
        await asyncio.sleep(self._network.delay_s())

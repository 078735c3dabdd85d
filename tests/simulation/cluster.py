"""What a simulated cluster has besides its network: servers that restart, components in slots."""

from collections.abc import Callable
from typing import Any

from dynamo_lite.protocol import names
from dynamo_lite.protocol.prefill import decode_job
from dynamo_lite.runtime.process.component import Component, Host
from tests.simulation.loop.process import SimProcess, SimState
from tests.simulation.network.network import Network
from tests.simulation.servers.etcd import EtcdServer
from tests.simulation.servers.etcd_data import EtcdData
from tests.simulation.servers.nats_server import NatsServer
from tests.simulation.supervisor import Slot

NAMESPACE = "sim"
#: How often a wiped etcd has the same cluster id as before, and how often an etcd that is
#: restarted with its data has compacted its history.
_SAME_CLUSTER, _COMPACTED = 0.7, 0.3


class Nats:
    """Implements the faults' Server. Its queues are in memory, and are lost with its process.

    on_end: called when its process has died.
    """

    def __init__(self, network: Network, on_start: Callable[[], None], on_end: Callable[[], None]):
        self._network, self._on_start, self._on_end = network, on_start, on_end
        self.start()

    def start(self, *, wiped: bool = False) -> None:
        self.process: SimProcess = self._network.loop.add_process("nats")
        self.server = NatsServer(self._network, self.process)
        self.process.watchers.append(self._changed)
        self._on_start()

    def _changed(self, _: SimProcess, state: SimState) -> None:
        if state is SimState.DEAD:
            self._on_end()

    def attempts(self) -> set[str]:
        """The attempts with a job on the queue, waiting or pulled."""
        return {decode_job(payload).attempt for payload in self._payloads()}

    def jobs(self) -> int:
        """How many jobs are on the prefill queue, waiting or pulled."""
        return len(self._payloads())

    def _payloads(self) -> list[bytes]:
        return self.server.jetstream.payloads(names.prefill_stream(NAMESPACE))


class Etcd:
    """Implements the faults' Server. on_expiry, slowest_answer_s: see `EtcdServer`. on_wipe: called
    when it has lost its data."""

    def __init__(
        self,
        network: Network,
        on_expiry: Callable[[int], None],
        slowest_answer_s: float,
        on_wipe: Callable[[], None],
    ):
        self._network, self._on_expiry, self._on_wipe = network, on_expiry, on_wipe
        self._slowest_answer_s = slowest_answer_s
        self._random = network.loop.stream("etcd").random
        self.data = EtcdData()
        #: Leases that the faults have revoked, or that their owners must take for revoked.
        self.revoked: set[int] = set()
        self.start()

    def start(self, *, wiped: bool = False) -> None:
        self.process: SimProcess = self._network.loop.add_process("etcd")
        if wiped:
            leases = self.data.leases.items()
            self.revoked |= {i for i, lease in leases if lease.unmarked and not lease.keys}
            self.data = self.data.wiped(same_cluster=self._random() < _SAME_CLUSTER)
            self._on_wipe()
        elif self._random() < _COMPACTED:
            self.data.compact(self.data.revision)
        self.server = EtcdServer(
            self._network,
            self.process,
            self.data,
            on_expiry=self._on_expiry,
            slowest_answer_s=self._slowest_answer_s,
        )

    def revoke(self, lease_id: int) -> bool:
        """Returns whether there was such a lease."""
        found = not self.process.dead and self.server.revoke(lease_id)
        if found:
            self.revoked.add(lease_id)
        return found

    def keys(self) -> list[str]:
        return sorted(key.decode() for key in self.data.keys)


class Watched:
    """A component that gives its host to its slot."""

    def __init__(self, inner: Component, slot: Slot):
        self._inner, self._slot = inner, slot

    async def start(self, host: Host) -> Any:
        self._slot.host = host
        return await self._inner.start(host)

    async def drain(self, grace_s: float) -> None:
        await self._inner.drain(grace_s)

    async def close(self) -> None:
        await self._inner.close()

    def health(self) -> Any:
        return self._inner.health()

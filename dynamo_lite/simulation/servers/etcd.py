"""A simulated etcd: what lies on its disk, and the server that works on it."""

import math
from dataclasses import dataclass, field
from typing import Any

from dynamo_lite.runtime.store import Delete, Put, Snapshot
from dynamo_lite.simulation.loop.handles import SimHandle
from dynamo_lite.simulation.loop.process import SimProcess
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.server import Connection, Server

PORT = 2379

_SHORTEST_TTL_S = 2
#: The server looks for leases that are over so often.
_EXPIRY_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Entry:
    value: bytes
    lease_id: int | None


@dataclass
class EtcdData:
    """Outlives the server's process. cluster: another one for each store that began empty."""

    cluster: int = 1
    revision: int = 1
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    history: list[tuple[int, Put | Delete]] = field(default_factory=list[Any])
    leases: dict[int, int] = field(default_factory=dict[int, int])  # id -> seconds to live

    def wiped(self) -> "EtcdData":
        """What is there after the disk was lost."""
        return EtcdData(cluster=self.cluster + 1)

    def matching(self, prefix: str) -> dict[str, bytes]:
        keys = sorted(key for key in self.entries if key.startswith(prefix))
        return {key: self.entries[key].value for key in keys}


@dataclass(frozen=True)
class Place:
    """Where in which history a client was."""

    cluster: int
    revision: int


class EtcdServer(Server):
    """Runs as `process` on `data` until that dies. As etcd does, it gives every lease
    its whole time-to-live anew when it starts."""

    def __init__(
        self, network: Network, process: SimProcess, data: EtcdData | None = None, port: int = PORT
    ):
        super().__init__(network, process, port)
        self.data = data or EtcdData()
        self._random = network.random
        self._deadlines: dict[int, float] = {}
        self._timers: dict[int, SimHandle] = {}
        self._watches: dict[tuple[Connection, int], str] = {}
        for lease_id in self.data.leases:
            process.run(self._live_on, lease_id)

    def left(self, connection: Connection) -> None:
        super().left(connection)
        for key in [key for key in self._watches if key[0] is connection]:
            del self._watches[key]

    # Keys

    def on_get(self, connection: Connection, key: str) -> bytes | None:
        entry = self.data.entries.get(key)
        return entry.value if entry else None

    def on_get_prefix(self, connection: Connection, prefix: str) -> dict[str, bytes]:
        return self.data.matching(prefix)

    def on_put(self, connection: Connection, key: str, value: bytes, lease_id: int | None) -> None:
        """Raises KeyError when it does not know the lease."""
        if lease_id is not None and lease_id not in self.data.leases:
            raise KeyError(lease_id)
        self.data.revision += 1
        self.data.entries[key] = Entry(value, lease_id)
        self._tell(Put(key, value))

    def on_create(
        self, connection: Connection, key: str, value: bytes, lease_id: int | None
    ) -> bool:
        """Raises KeyError when it does not know the lease."""
        if lease_id is not None and lease_id not in self.data.leases:
            raise KeyError(lease_id)
        if key in self.data.entries:
            return False
        self.on_put(connection, key, value, lease_id)
        return True

    def on_swap(self, connection: Connection, key: str, old: bytes | None, new: bytes) -> bool:
        if self.on_get(connection, key) != old:
            return False
        self.on_put(connection, key, new, None)
        return True

    def on_delete(self, connection: Connection, key: str) -> bool:
        if key not in self.data.entries:
            return False
        self.data.revision += 1
        self._remove(key)
        return True

    # Leases

    def on_grant(
        self, connection: Connection, ttl_s: float, lease_id: int | None
    ) -> tuple[int, int, Place] | None:
        """Returns id, time-to-live and place; None when `lease_id` is taken."""
        if lease_id in self.data.leases:
            return None
        if lease_id is None:
            lease_id = (1 << 60) + int(self._random() * (1 << 52))
        self.data.leases[lease_id] = max(_SHORTEST_TTL_S, math.ceil(ttl_s))
        self._live_on(lease_id)
        return lease_id, self.data.leases[lease_id], self._place()

    def on_refresh(self, connection: Connection, lease_id: int) -> tuple[int, Place]:
        """Returns the time-to-live, 0 of a lease that is not known."""
        if lease_id not in self.data.leases:
            return 0, self._place()
        self._live_on(lease_id)
        return self.data.leases[lease_id], self._place()

    def on_revoke(self, connection: Connection, lease_id: int) -> bool:
        return self._end_lease(lease_id)

    def revoke(self, lease_id: int) -> bool:
        """As an operator's call, without a client."""
        return self.process.run(self._end_lease, lease_id)

    # Watches

    def on_watch(
        self, connection: Connection, number: int, prefix: str, place: Place | None
    ) -> None:
        """Sends ("watched", number, place, events), now and whenever something changes."""
        data = self.data
        self._watches[connection, number] = prefix
        events: list[Any]
        if place and place.cluster == data.cluster and place.revision <= data.revision:
            events = [
                event
                for revision, event in data.history
                if revision > place.revision and event.key.startswith(prefix)
            ]
        else:
            events = [Snapshot(data.matching(prefix), lost_data=place is not None)]
        connection.send(("watched", number, self._place(), events))

    def on_unwatch(self, connection: Connection, number: int) -> None:
        self._watches.pop((connection, number), None)

    def _place(self) -> Place:
        return Place(self.data.cluster, self.data.revision)

    def _tell(self, event: Put | Delete) -> None:
        self.data.history.append((self.data.revision, event))
        for (connection, number), prefix in self._watches.items():
            if event.key.startswith(prefix):
                connection.send(("watched", number, self._place(), [event]))

    def _remove(self, key: str) -> None:
        del self.data.entries[key]
        self._tell(Delete(key))

    def _live_on(self, lease_id: int) -> None:
        ttl_s = self.data.leases[lease_id]
        self._deadlines[lease_id] = self.loop.time() + ttl_s
        if lease_id not in self._timers:
            self._wait(lease_id)

    def _wait(self, lease_id: int) -> None:
        when = self._deadlines[lease_id] + _EXPIRY_INTERVAL_S * self._random()
        self._timers[lease_id] = self.loop.call_at(when, self._look, lease_id)

    def _look(self, lease_id: int) -> None:
        if self.loop.time() < self._deadlines[lease_id]:
            self._wait(lease_id)
        else:
            self.loop.trace.add(f"lease {lease_id:x} has expired")
            self._end_lease(lease_id)

    def _end_lease(self, lease_id: int) -> bool:
        if self.data.leases.pop(lease_id, None) is None:
            return False
        self._timers.pop(lease_id).cancel()
        del self._deadlines[lease_id]
        keys = [k for k, entry in self.data.entries.items() if entry.lease_id == lease_id]
        self.data.revision += bool(keys)
        for key in keys:
            self._remove(key)
        return True

"""The leases of a simulated etcd that runs: until when each lasts, and the timers that end them.

What they are, with their keys, lies on the disk (`etcd_data.py`), and outlives this.
"""

import math
from collections.abc import Callable

from tests.simulation.loop.handles import SimHandle
from tests.simulation.network.network import Network
from tests.simulation.servers.etcd_data import EtcdData, StoredLease

_SHORTEST_TTL_S = 2
#: How often the server checks for expired leases.
_EXPIRY_INTERVAL_S = 0.5


class EtcdLeases:
    """To be used in the server's process.

    commit: makes the deletion of a lease's keys one revision. on_expiry: called with the id of
    each expired lease: when it expires, and at each later attempt to refresh it.
    """

    def __init__(
        self,
        data: EtcdData,
        network: Network,
        commit: Callable[[], None],
        on_expiry: Callable[[int], None],
    ):
        self._data, self._loop, self._random = data, network.loop, network.random
        self._commit, self._on_expiry = commit, on_expiry
        self._deadlines: dict[int, float] = {}
        self._timers: dict[int, SimHandle] = {}

    def grant(self, lease_id: int, ttl_s: float) -> tuple[int, int]:
        """lease_id: not in use; 0 for any. Returns the lease's id and its time-to-live in s."""
        lease_id = lease_id or (1 << 60) + int(self._random() * (1 << 52))
        whole_s = max(_SHORTEST_TTL_S, math.ceil(ttl_s))
        self._data.leases[lease_id] = StoredLease(whole_s, unmarked=not self._data.keys)
        self.live_on(lease_id)
        return lease_id, whole_s

    def keep_alive(self, lease_id: int) -> int:
        """Returns the time-to-live in s; 0 if the lease is unknown or has expired, and then it is
        not refreshed."""
        if lease_id in self._data.expired:
            self._on_expiry(lease_id)
        lease = self._data.leases.get(lease_id)
        if lease is None:
            return 0
        if self._loop.time() >= self._deadlines[lease_id]:
            self._expire(lease_id)
            return 0
        self.live_on(lease_id)
        lease.unmarked = lease.unmarked and not self._data.keys
        return lease.ttl_s

    def live_on(self, lease_id: int) -> None:
        """Gives a lease that is stored its whole time-to-live."""
        self._deadlines[lease_id] = self._loop.time() + self._data.leases[lease_id].ttl_s
        if lease_id not in self._timers:
            self._wait(lease_id)

    def end(self, lease_id: int) -> bool:
        """Deletes a lease and its keys. Returns whether it was known."""
        lease = self._data.leases.get(lease_id)
        if lease is None:
            return False
        self._timers.pop(lease_id).cancel()
        del self._deadlines[lease_id]
        for key in list(lease.keys):
            self._data.delete(key)
        del self._data.leases[lease_id]
        self._commit()
        return True

    def _wait(self, lease_id: int) -> None:
        when = self._deadlines[lease_id] + _EXPIRY_INTERVAL_S * self._random()
        self._timers[lease_id] = self._loop.call_at(when, self._look, lease_id)

    def _look(self, lease_id: int) -> None:
        if self._loop.time() < self._deadlines[lease_id]:
            self._wait(lease_id)
        else:
            self._expire(lease_id)

    def _expire(self, lease_id: int) -> None:
        self._loop.trace.add(f"lease {lease_id:x} has expired")
        self.end(lease_id)
        self._data.expired.add(lease_id)
        self._on_expiry(lease_id)

"""What lies on a simulated etcd's disk: every key as of every revision, and the leases."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aetcd import rpc

from tests.simulation.loop.process import SimHandle
from tests.simulation.network.network import Network

#: To the end of all keys, as the end of a range; as its beginning, from the first key on.
_ALL = b"\0"


def in_range(key: bytes, first: bytes, end: bytes) -> bool:
    """As etcd reads the two of a request: without an end `first` is the only key."""
    if not end:
        return key == first
    return first <= key and (end == _ALL or key < end)


@dataclass
class StoredLease:
    """A granted lease."""

    ttl_s: int
    #: The store had no key at the owner's last request. The owner cannot see that etcd is wiped.
    unmarked: bool = False
    #: The keys that end with the lease. The values mean nothing.
    keys: dict[bytes, None] = field(default_factory=dict[bytes, None])


@dataclass
class EtcdData:
    """Outlives the server's process. `rpc.KeyValue` and `rpc.Event` are never changed once they
    are in here."""

    #: Id of the cluster.
    cluster: int = 1
    #: Of the last change.
    revision: int = 1
    #: The first revision that is still known.
    compacted: int = 0
    keys: dict[bytes, Any] = field(default_factory=dict[bytes, Any])  # key -> rpc.KeyValue
    leases: dict[int, StoredLease] = field(default_factory=dict[int, StoredLease])
    #: Ids of expired leases.
    expired: set[int] = field(default_factory=set[int])
    #: Called with the `rpc.Event`s of each revision.
    on_commit: Callable[[list[Any]], None] = lambda events: None
    _events: list[Any] = field(default_factory=list[Any])  # rpc.Event, oldest first
    _before: dict[bytes, Any] = field(default_factory=dict[bytes, Any])  # before `_events`
    _uncommitted: list[Any] = field(default_factory=list[Any])

    def wiped(self, *, same_cluster: bool = True) -> "EtcdData":
        """The data after the disk was lost.

        same_cluster: etcd derives the id from its members' addresses, so a member that is
        started again without its data, and nothing else changed, has the id of before.
        """
        cluster = self.cluster if same_cluster else self.cluster + 1
        return EtcdData(cluster=cluster, on_commit=self.on_commit)

    # Reading

    def range(self, first: bytes, end: bytes, revision: int) -> Iterator[Any]:
        """The `rpc.KeyValue`s of a range, by key, at a revision that is still known."""
        keys = self.keys if revision >= self.revision else self._keys_at(revision)
        if not end:
            return iter([keys[first]] if first in keys else [])
        return iter([keys[key] for key in sorted(keys) if in_range(key, first, end)])

    def matching(self, prefix: str) -> dict[str, bytes]:
        """What is under a prefix now."""
        found = sorted(key for key in self.keys if key.startswith(prefix.encode()))
        return {key.decode(): self.keys[key].value for key in found}

    def events_since(self, first: bytes, end: bytes, revision: int) -> list[Any]:
        """The `rpc.Event`s of a range from `revision` on."""
        return [
            event
            for event in self._events
            if event.kv.mod_revision >= revision and in_range(event.kv.key, first, end)
        ]

    def _keys_at(self, revision: int) -> dict[bytes, Any]:
        keys = dict(self._before)
        for event in self._events:
            if event.kv.mod_revision > revision:
                break
            _apply(keys, event)
        return keys

    # Writing: several changes become one revision

    def put(self, key: bytes, value: bytes, lease_id: int = 0) -> None:
        """The lease must be known; 0 for none."""
        former = self.keys.get(key)
        revision = self.revision + 1
        self._leave_lease(former)
        if lease_id:
            self.leases[lease_id].keys[key] = None
        kv = rpc.KeyValue(
            key=key,
            value=value,
            create_revision=former.create_revision if former else revision,
            mod_revision=revision,
            version=former.version + 1 if former else 1,
            lease=lease_id,
        )
        self._change(rpc.Event(type=rpc.Event.PUT, kv=kv))

    def delete(self, key: bytes) -> None:
        """The key must be there."""
        self._leave_lease(self.keys[key])
        kv = rpc.KeyValue(key=key, mod_revision=self.revision + 1)
        self._change(rpc.Event(type=rpc.Event.DELETE, kv=kv))

    def commit(self) -> list[Any]:
        """Makes the changes since the last commit a revision; returns its `rpc.Event`s."""
        events, self._uncommitted = self._uncommitted, []
        if events:
            self.revision += 1
            self._events += events
            self.on_commit(events)
        return events

    def compact(self, revision: int) -> None:
        """Forgets what was before `revision`, which must not lie in the future."""
        kept = [event for event in self._events if event.kv.mod_revision >= revision]
        for event in self._events[: len(self._events) - len(kept)]:
            _apply(self._before, event)
        self._events, self.compacted = kept, revision

    def _change(self, event: Any) -> None:
        _apply(self.keys, event)
        self._uncommitted.append(event)

    def _leave_lease(self, former: Any) -> None:
        if former is not None and former.lease in self.leases:
            self.leases[former.lease].keys.pop(former.key, None)


def _apply(keys: dict[bytes, Any], event: Any) -> None:
    if event.type == rpc.Event.PUT:
        keys[event.kv.key] = event.kv
    else:
        keys.pop(event.kv.key, None)


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

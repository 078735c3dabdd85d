"""What lies on a simulated etcd's disk: every key as of every revision, and the leases."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aetcd import rpc

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

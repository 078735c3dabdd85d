"""The store: keys with leases, and watches that never go silent.

`etcd.py` is the real one; `memory.py` has the in-process twin. Both pass
`tests/contract/test_store.py`.
"""

import enum
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


class LeaseLoss(enum.Enum):
    """Why a lease ended."""

    REVOKED = "revoked"  # somebody asked this process to leave
    EXPIRED = "expired"  # it could not be refreshed, or granted anew, within its time-to-live
    CLOSED = "closed"  # its owner gave it back


class Lease(Protocol):
    """A lease that is kept alive until it is lost or its context ends.

    A store that lost its data is given the same lease again, as long as this process's
    own clock says that it lives. Keys are their owner's to put back.
    """

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> float: ...

    @property
    def loss(self) -> LeaseLoss | None:
        """None while the lease is held."""
        ...

    def remaining_s(self) -> float:
        """Seconds that it certainly still lives, by this host's CLOCK_BOOTTIME."""
        ...

    async def lost(self) -> LeaseLoss:
        """Returns when the lease is gone, with the reason."""
        ...

    async def verify(self) -> LeaseLoss | None:
        """Asks the store now instead of at the next refresh.

        Returns the loss, or None while the lease is held or the store is out of reach.
        """
        ...


@dataclass(frozen=True)
class Snapshot:
    """The whole prefix as it is: first event of a watch, and after every resync.

    lost_data: the store has forgotten what it had told before. Then the absence of a
    key proves nothing: its owner may be about to put it back.
    """

    entries: dict[str, bytes]
    lost_data: bool = False


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes


@dataclass(frozen=True)
class Delete:
    key: str


WatchEvent = Snapshot | Put | Delete


class Store(Protocol):
    """Every call raises StoreUnavailable when there is no answer in time."""

    async def get(self, key: str) -> bytes | None: ...

    async def get_prefix(self, prefix: str) -> dict[str, bytes]: ...

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        """Raises LeaseLost when the lease is gone."""
        ...

    async def create(self, key: str, value: bytes, *, lease: Lease | None = None) -> bool:
        """Puts if the key is absent. Returns whether it was."""
        ...

    async def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Puts `new` if the key holds `old` (None: if it is absent). Returns whether it did.

        The key hangs on no lease afterwards.
        """
        ...

    async def delete(self, key: str) -> bool:
        """Returns whether the key was there."""
        ...

    def lease(self, ttl_s: float) -> AbstractAsyncContextManager[Lease]:
        """Grants a lease, keeps it alive until the context ends, and revokes it then."""
        ...

    async def revoke(self, lease_id: int) -> bool:
        """Revokes anybody's lease. Returns whether it existed."""
        ...

    def watch(self, prefix: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """List, then watch. Survives reconnects; resyncs by a new Snapshot."""
        ...

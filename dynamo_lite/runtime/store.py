"""The store: keys with leases, and watches that survive reconnects.

`runtime/etcd/store.py` implements it on etcd. The simulation has others; all pass
`tests/contract/test_store.py`.
"""

import asyncio
import contextlib
import enum
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.runtime.tasks import OnFailure, log_failure, running

#: How long a watch may take to show what is there when it begins.
_LISTED_WITHIN_S = 10.0


class LeaseLoss(enum.Enum):
    """Why a lease ended."""

    #: An operator or another process has revoked it: this process is to leave.
    REVOKED = "revoked"
    #: It could not be refreshed, or granted again, within its time-to-live.
    EXPIRED = "expired"
    #: Its owner has closed it.
    CLOSED = "closed"


class Lease(Protocol):
    """A lease that is kept alive until it is lost or its context ends.

    When the store has lost its data, the same lease is granted again, provided that it has not
    expired by this process's own clock. The owner of a key must put the key back.
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
        """Seconds until it may expire, by this host's CLOCK_BOOTTIME."""
        ...

    async def lost(self) -> LeaseLoss:
        """Waits until the lease is lost. Returns the reason."""
        ...

    async def verify(self) -> LeaseLoss | None:
        """Refreshes the lease now.

        Returns the loss, or None while the lease is held or the store is unavailable.
        """
        ...


@dataclass(frozen=True)
class Snapshot:
    """All keys under the prefix: the first event of a watch, and the first after each reconnect.
    Then a key that is missing may come back: if the store has lost its data, its owner may be about
    to put it again."""

    entries: dict[str, bytes]


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes


@dataclass(frozen=True)
class Delete:
    key: str


WatchEvent = Snapshot | Put | Delete


class Store(Protocol):
    """Every call raises StoreUnavailable when the store does not reply in time."""

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

        Afterwards the key has no lease.
        """
        ...

    async def delete(self, key: str) -> bool:
        """Returns whether the key was there."""
        ...

    def lease(self, ttl_s: float) -> AbstractAsyncContextManager[Lease]:
        """Grants a lease, keeps it alive until the context ends, and revokes it then."""
        ...

    async def revoke(self, lease_id: int) -> bool:
        """Revokes the lease of any process. Returns whether it existed."""
        ...

    def watch(self, prefix: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Lists, then watches. Each reconnect gives a new Snapshot. For one task, and endless: a
        cancelled wait for the next event may end it."""
        ...


def changes(event: WatchEvent, known: Iterable[str]) -> dict[str, bytes | None]:
    """The keys of the event with their values; None: the key is gone.

    known: the keys that the caller has. Those that a Snapshot does not have are gone.
    """
    match event:
        case Snapshot(entries):
            return {**dict.fromkeys(known), **entries}
        case Put(key, value):
            return {key: value}
        case Delete(key):
            return {key: None}


@contextlib.asynccontextmanager
async def following(
    store: Store,
    prefix: str,
    take: Callable[[WatchEvent], Awaitable[None] | None],
    on_failure: OnFailure = log_failure,
) -> AsyncGenerator[None]:
    """Gives each event of a watch on `prefix` to `take`.

    Entering waits until `take` has the first listing. Raises StoreUnavailable when it comes too
    late. on_failure: of the task that gives the events after it.
    """

    async def give(event: WatchEvent) -> None:
        if (taken := take(event)) is not None:
            await taken

    async def follow(events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            await give(event)

    async with store.watch(prefix) as events:
        try:
            async with asyncio.timeout(_LISTED_WITHIN_S):
                first = await anext(events)
        except TimeoutError as exc:
            raise StoreUnavailable(
                f"timeout: no listing of {prefix} within {_LISTED_WITHIN_S:g} s"
            ) from exc
        await give(first)
        async with running(follow(events), name=f"follow {prefix}", on_failure=on_failure):
            yield

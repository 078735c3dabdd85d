"""In-process twins of the store and of messaging: the contracts of etcd and NATS, with outages,
wipes and a clock on demand."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    LeaseLost,
    NoResponders,
    ProtocolError,
    StoreUnavailable,
)
from dynamo_lite.runtime.listeners import Listeners
from dynamo_lite.runtime.messaging import Dispatcher, Handler, OnConnection
from dynamo_lite.runtime.retry import retry_while_unavailable
from dynamo_lite.runtime.store import Delete, Lease, LeaseLoss, Put, Snapshot, WatchEvent
from dynamo_lite.runtime.tasks import end_tasks

_REFRESHES_PER_TTL = 10
_lease_ids = itertools.count(0x1A2B3C01)


class MemoryLease:
    """A lease of a `MemoryStore`."""

    def __init__(self, store: "MemoryStore", ttl_s: float):
        self._store = store
        self.id = next(_lease_ids)
        self.ttl_s = ttl_s
        self._deadline = store.now() + ttl_s
        self._loss: LeaseLoss | None = None
        self._lost = asyncio.Event()

    @property
    def loss(self) -> LeaseLoss | None:
        if self._loss is None and self._store.now() >= self._deadline:
            self._store.end_lease(self, LeaseLoss.EXPIRED)
        return self._loss

    def remaining_s(self) -> float:
        return 0.0 if self._loss else max(0.0, self._deadline - self._store.now())

    async def lost(self) -> LeaseLoss:
        await self._lost.wait()
        assert self._loss is not None
        return self._loss

    async def verify(self) -> LeaseLoss | None:
        self.refresh()
        return self.loss

    def refresh(self) -> None:
        """Restarts the time-to-live, if the store is available and the lease is not lost.

        A store that was wiped is given the lease again.
        """
        if self.loss is None and self._store.available:
            self._store.admit(self)
            self._deadline = self._store.now() + self.ttl_s

    def end(self, loss: LeaseLoss) -> None:
        if self._loss is None:
            self._loss = loss
            self._lost.set()

    async def keep_alive(self) -> None:
        while self.loss is None:
            self.refresh()
            pause_s = min(self.ttl_s / _REFRESHES_PER_TTL, max(self.remaining_s(), 0.001))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._lost.wait()


class MemoryWatch(AsyncIterator[WatchEvent]):
    """Events of one prefix, in order."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._events: asyncio.Queue[WatchEvent] = asyncio.Queue()

    def __aiter__(self) -> "MemoryWatch":
        return self

    async def __anext__(self) -> WatchEvent:
        return await self._events.get()

    def tell(self, event: WatchEvent) -> None:
        self._events.put_nowait(event)


@dataclass(frozen=True)
class _Entry:
    value: bytes
    lease: MemoryLease | None


class MemoryStore:
    """Implements `Store` for the tasks of one event loop, which may share one instance.

    clock: seconds, monotonic; leases run out by it. Keepalives are woken by real
    time: with a clock of its own a test calls `expire_due` after moving it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic):
        self.now = clock
        self.available = True
        self._entries: dict[str, _Entry] = {}
        self._leases: dict[int, MemoryLease] = {}
        self._watches: set[MemoryWatch] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def set_available(self, available: bool) -> None:
        """False: calls raise, keepalives fail, watches are silent. True: watches resync."""
        returned = available and not self.available
        self.available = available
        if returned:
            self.expire_due()
            self._resync()

    def wipe(self) -> None:
        """Forgets all keys and leases, as an etcd that is started again without its data."""
        self._entries.clear()
        self._leases.clear()
        if self.available:
            self._resync()

    def admit(self, lease: MemoryLease) -> None:
        """Stores `lease`, even if it was forgotten."""
        self._leases[lease.id] = lease

    def expire_due(self) -> None:
        """Ends the expired leases."""
        for lease in list(self._leases.values()):
            _ = lease.loss

    def end_lease(self, lease: MemoryLease, loss: LeaseLoss) -> None:
        """Ends `lease` for both sides: its owner knows, and its keys are gone."""
        lease.end(loss)
        self._leases.pop(lease.id, None)
        for key in [k for k, entry in self._entries.items() if entry.lease is lease]:
            self._remove(key)

    async def get(self, key: str) -> bytes | None:
        self._check()
        entry = self._entries.get(key)
        return entry.value if entry else None

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        self._check()
        return self._matching(prefix)

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        self._entries[key] = _Entry(value, await self._held(lease))
        self._tell(Put(key, value))

    async def create(self, key: str, value: bytes, *, lease: Lease | None = None) -> bool:
        held = await self._held(lease)
        if key in self._entries:
            return False
        self._entries[key] = _Entry(value, held)
        self._tell(Put(key, value))
        return True

    async def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        if await self.get(key) != old:
            return False
        await self.put(key, new)
        return True

    async def delete(self, key: str) -> bool:
        self._check()
        return self._remove(key)

    async def revoke(self, lease_id: int) -> bool:
        self._check()
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        self.end_lease(lease, LeaseLoss.REVOKED)
        return True

    @contextlib.asynccontextmanager
    async def lease(self, ttl_s: float) -> AsyncIterator[MemoryLease]:
        self._check()
        lease = MemoryLease(self, ttl_s)
        self.admit(lease)
        task = asyncio.create_task(lease.keep_alive(), name=f"keep lease {lease.id:x}")
        try:
            yield lease
        finally:
            await end_tasks(task)
            self.end_lease(lease, LeaseLoss.CLOSED)

    @contextlib.asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[MemoryWatch]:
        watch = MemoryWatch(prefix)
        if self.available:
            watch.tell(Snapshot(self._matching(prefix)))
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def _check(self) -> None:
        if not self.available:
            raise StoreUnavailable("the memory store is switched off")

    async def _held(self, lease: Lease | None) -> MemoryLease | None:
        """The store's own side of `lease`. Raises LeaseLost or StoreUnavailable."""
        if lease is not None and lease.loss is not None:
            raise LeaseLost(lease.id, lease.loss.value)
        self._check()
        if lease is None:
            return None
        if lease.id not in self._leases:
            await lease.verify()
        held = self._leases.get(lease.id)
        if held is None:
            raise LeaseLost(lease.id, "the store does not know it")
        return held

    def _resync(self) -> None:
        for watch in self._watches:
            watch.tell(Snapshot(self._matching(watch.prefix)))

    def _matching(self, prefix: str) -> dict[str, bytes]:
        keys = sorted(key for key in self._entries if key.startswith(prefix))
        return {key: self._entries[key].value for key in keys}

    def _remove(self, key: str) -> bool:
        if self._entries.pop(key, None) is None:
            return False
        self._tell(Delete(key))
        return True

    def _tell(self, event: Put | Delete) -> None:
        if not self.available:
            return
        for watch in self._watches:
            if event.key.startswith(watch.prefix):
                watch.tell(event)


class MemoryMessaging:
    """Implements `Messaging` for the tasks of one event loop, which share one instance.

    As with NATS every server of a subject gets every message, and the first
    answer to a request wins.
    """

    def __init__(self) -> None:
        self.connected = True
        self._listeners = Listeners[[bool]]("the connection")
        self._served: dict[str, list[Dispatcher]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def set_connected(self, connected: bool) -> None:
        """False: calls raise BrokerUnavailable and replies are lost."""
        changed, self.connected = connected != self.connected, connected
        if changed:
            self._listeners.notify(connected)

    def watch_connection(self, callback: OnConnection) -> AbstractContextManager[object]:
        return self._listeners.add(callback)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        self._check(subject, payload)
        servers = list(self._served.get(subject, ()))
        if not servers:
            raise NoResponders(f"no process serves {subject}")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def reply(data: bytes) -> None:
            if self.connected and not answer.done():
                answer.set_result(data)

        try:
            async with asyncio.timeout(timeout_s):
                for server in servers:
                    await server.submit(payload, reply)
                return await answer
        except TimeoutError as exc:
            raise DeadlineExceeded(f"request to {subject}", timeout_s) from exc

    async def publish(self, subject: str, payload: bytes) -> None:
        self._check(subject, payload)
        for server in list(self._served.get(subject, ())):
            await server.submit(payload, None)

    @contextlib.asynccontextmanager
    async def serve(self, subject: str, handler: Handler) -> AsyncIterator[None]:
        await retry_while_unavailable(self._await_connected)
        async with Dispatcher(subject, handler) as dispatcher:
            self._served.setdefault(subject, []).append(dispatcher)
            try:
                yield
            finally:
                self._served[subject].remove(dispatcher)
                if not self._served[subject]:
                    del self._served[subject]

    async def _await_connected(self) -> None:
        self._check_connected()

    def _check_connected(self) -> None:
        if not self.connected:
            raise BrokerUnavailable("the memory broker is switched off")

    def _check(self, subject: str, payload: bytes) -> None:
        self._check_connected()
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"the message to {subject} exceeds the broker's limit")

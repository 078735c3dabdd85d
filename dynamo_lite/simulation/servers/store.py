"""The store as one simulated process uses it, through the simulated etcd."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Self

from dynamo_lite.protocol.errors import LeaseLost, StartupError, StoreUnavailable
from dynamo_lite.runtime.store import Lease, LeaseLoss, WatchEvent
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.etcd import PORT, Place
from dynamo_lite.simulation.servers.lease import SimLease
from dynamo_lite.simulation.servers.link import LinkDown, ServerLink

logger = logging.getLogger(__name__)

#: gRPC pings a connection that is silent for 5 s, and waits 2 s for the answer.
_SILENCE_S = (5.0, 7.0)


class SimStore:
    """Implements `Store` for the process in which it is made.

    timeout_s: longest wait for the answer to one call. A call that timed out may
    have been applied.
    """

    def __init__(
        self,
        network: Network,
        *,
        port: int = PORT,
        timeout_s: float = 2.0,
        connect_timeout_s: float = 10.0,
    ):
        self._loop = network.loop
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._watches: dict[int, SimWatch] = {}
        self._numbers = 0
        self._link = ServerLink(
            network,
            network.loop.current_process(),
            port,
            silence_s=_SILENCE_S,
            on_push=self._take,
            on_state=self._on_state,
        )

    def __repr__(self) -> str:
        return f"SimStore({self._link!r}, watches={len(self._watches)})"

    async def __aenter__(self) -> Self:
        try:
            await self._link.open(self._connect_timeout_s)
        except BaseException as exc:
            self._link.close()
            if isinstance(exc, TimeoutError):
                raise StartupError("cannot use etcd: no answer in time") from exc
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._link.close()

    async def get(self, key: str) -> bytes | None:
        return await self.call("get", key)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        return await self.call("get_prefix", prefix)

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        await self._put("put", key, value, lease)

    async def create(self, key: str, value: bytes, *, lease: Lease | None = None) -> bool:
        return await self._put("create", key, value, lease)

    async def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        return await self.call("swap", key, old, new)

    async def delete(self, key: str) -> bool:
        return await self.call("delete", key)

    async def revoke(self, lease_id: int) -> bool:
        return await self.call("revoke", lease_id)

    @contextlib.asynccontextmanager
    async def lease(self, ttl_s: float) -> AsyncIterator[Lease]:
        asked_at = self._loop.time()
        granted = await self.call("grant", ttl_s, None)
        lease = SimLease(self.call, self._loop.time, granted, granted_at=asked_at)
        task = asyncio.create_task(lease.keep_alive(), name=f"keep lease {lease.id:x}")
        try:
            yield lease
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if lease.loss is None:
                lease.end(LeaseLoss.CLOSED)
                try:
                    await self.revoke(lease.id)
                except StoreUnavailable as exc:
                    logger.info("lease %x is left to expire: %s", lease.id, exc)

    @contextlib.asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator["SimWatch"]:
        self._numbers += 1
        number = self._numbers
        watch = self._watches[number] = SimWatch(prefix)
        try:
            with contextlib.suppress(LinkDown):
                self._link.send(("watch", number, prefix, None))
            yield watch
        finally:
            del self._watches[number]
            with contextlib.suppress(LinkDown):
                self._link.send(("unwatch", number))
            watch.close()

    async def call(self, operation: str, *arguments: Any) -> Any:
        """Raises StoreUnavailable, and KeyError of a lease that etcd does not know."""
        try:
            return await self._link.call(operation, *arguments, timeout_s=self._timeout_s)
        except LinkDown as exc:
            raise StoreUnavailable("etcd: failed to connect") from exc
        except TimeoutError as exc:
            raise StoreUnavailable("etcd: no answer in time") from exc

    async def _put(self, operation: str, key: str, value: bytes, lease: Lease | None) -> Any:
        if lease is None:
            return await self.call(operation, key, value, None)
        if lease.loss is not None:
            raise LeaseLost(lease.id, lease.loss.value)
        try:
            return await self.call(operation, key, value, lease.id)
        except KeyError as exc:
            raise LeaseLost(lease.id, "etcd does not know it") from exc

    def _on_state(self, up: bool) -> None:
        logger.info("etcd: %s", "connected" if up else "disconnected; reconnecting")
        if up:
            for number, watch in self._watches.items():
                self._link.send(("watch", number, watch.prefix, watch.place))

    def _take(self, item: Any) -> None:
        _, number, place, events = item
        watch = self._watches.get(number)
        if watch is not None:
            watch.tell(place, events)


class SimWatch(AsyncIterator[WatchEvent]):
    """Events of one prefix, in order. place: of the last thing told."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.place: Place | None = None
        self._events: asyncio.Queue[WatchEvent | None] = asyncio.Queue()
        self._closed = False

    def __aiter__(self) -> "SimWatch":
        return self

    async def __anext__(self) -> WatchEvent:
        event = None if self._closed else await self._events.get()
        if event is None:
            raise StopAsyncIteration
        return event

    def tell(self, place: Place, events: list[WatchEvent]) -> None:
        self.place = place
        for event in events:
            self._events.put_nowait(event)

    def close(self) -> None:
        """Ends the iteration; what was not taken yet is dropped."""
        self._closed = True
        self._events.put_nowait(None)

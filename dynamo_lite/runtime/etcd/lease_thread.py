"""An etcd lease that is kept alive in its own thread.

The event loop of a process may stall for longer than the lease's time-to-live: in an import, a
large request body, a garbage collection. The thread has its own event loop and connection, so
such a stall does not lose the lease.

A process whose event loop hangs forever must not stay a member. At each refresh the thread
schedules a callback in the owner's event loop. It gives up the lease when none has run for
`HUNG_S`, or for the lease's time-to-live if that is longer.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import aetcd
from aetcd import rpc

from dynamo_lite.runtime.address import ServerAddress
from dynamo_lite.runtime.etcd.backend import EtcdBackend, Portal
from dynamo_lite.runtime.etcd.client import EtcdClient, details
from dynamo_lite.runtime.etcd.lease import EtcdLease, grant_lease
from dynamo_lite.runtime.store import LeaseLoss

logger = logging.getLogger(__name__)

T = TypeVar("T")

HUNG_S = 120.0


class ThreadedLease:
    """Implements `Lease` in the event loop that made it, for an EtcdLease in another thread."""

    def __init__(self, inner: EtcdLease, portal: Portal, boottime: Callable[[], float]):
        self._inner, self._portal, self._boottime = inner, portal, boottime
        self._loss: LeaseLoss | None = None
        self._lost = asyncio.Event()

    def __repr__(self) -> str:
        state = self._loss.value if self._loss else f"{self.remaining_s():.1f} s left"
        return f"ThreadedLease({self.id:x}, {state})"

    @property
    def id(self) -> int:
        return self._inner.id

    @property
    def ttl_s(self) -> float:
        return self._inner.ttl_s

    @property
    def deadline(self) -> float:
        """See `EtcdLease.deadline`."""
        return self._inner.deadline

    @property
    def loss(self) -> LeaseLoss | None:
        if self._loss is None:
            if (known := self._inner.known_loss) is not None:
                self.end(known)
            elif self._boottime() >= self.deadline:
                self.end(LeaseLoss.EXPIRED)
        return self._loss

    def remaining_s(self) -> float:
        return 0.0 if self.loss else max(0.0, self.deadline - self._boottime())

    async def lost(self) -> LeaseLoss:
        await self._lost.wait()
        assert self._loss is not None
        return self._loss

    async def verify(self) -> LeaseLoss | None:
        if self.loss is None and (loss := await _call(self._portal, self._inner.verify)):
            self.end(loss)
        return self.loss

    def holds(self, key: bytes, revision: int) -> None:
        """See `EtcdLease.holds`."""
        if self._loss is None:
            self._portal.start_task_soon(self._inner.holds, key, revision)

    def end(self, loss: LeaseLoss) -> None:
        """Marks the lease as lost, here and in its thread. Only the first reason counts."""
        if self._loss is None:
            self._loss = loss
            self._lost.set()
            self._portal.start_task_soon(self._inner.end, loss)


@contextlib.asynccontextmanager
async def lease_in_thread(
    address: ServerAddress,
    ttl_s: float,
    backend: EtcdBackend,
) -> AsyncIterator[ThreadedLease]:
    """Grants a lease, keeps it alive, and revokes it at the end.

    Raises what `EtcdClient.call` raises when etcd grants none, and ConfigError when a file of
    `address.tls` cannot be read.
    """
    owner = asyncio.get_running_loop()
    async with backend.open_portal() as portal:
        keeper = _Keeper(address, ttl_s, backend)
        kept: Future[None] | None = None
        try:
            inner = await _call(portal, keeper.open)
            lease = ThreadedLease(inner, portal, backend.clock.boottime)
            kept = portal.start_task_soon(keeper.keep, owner, lease.end)
            kept.add_done_callback(_log_failure)
            try:
                yield lease
            finally:
                given_back = lease.loss is None
                lease.end(LeaseLoss.CLOSED)
                if given_back:
                    await _call(portal, keeper.revoke)
        finally:
            if kept is not None:
                kept.cancel()
            await _call(portal, keeper.close)


class _Keeper:
    """The part that runs in the thread."""

    _client: EtcdClient | None = None
    _lease: EtcdLease

    def __init__(self, address: ServerAddress, ttl_s: float, backend: EtcdBackend):
        self._address, self._ttl_s, self._backend = address, ttl_s, backend

    async def open(self) -> EtcdLease:
        self._client = EtcdClient(self._address, self._backend)
        self._lease = await grant_lease(self._client, self._ttl_s, self._backend.clock.boottime)
        return self._lease

    async def keep(
        self, owner: asyncio.AbstractEventLoop, end: Callable[[LeaseLoss], None]
    ) -> None:
        """Runs until the lease is lost; then it calls `end` in the owner's event loop."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lease.keep_alive())
            watch = tasks.create_task(self._watch(owner))
            loss = await self._lease.lost()
            with contextlib.suppress(RuntimeError):  # the owner's event loop is closed
                owner.call_soon_threadsafe(end, loss)
            watch.cancel()

    async def revoke(self) -> None:
        client, lease = self._client, self._lease
        assert client is not None
        try:
            await client.call(lambda: client.revoke_lease(lease.id))
        except (aetcd.ClientError, rpc.AioRpcError, TimeoutError) as exc:
            logger.info("lease %x was not revoked, it expires: %s", lease.id, details(exc))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _watch(self, owner: asyncio.AbstractEventLoop) -> None:
        """Gives the lease up when the owner's event loop does not answer."""
        thread, hung_s = asyncio.get_running_loop(), max(HUNG_S, self._ttl_s)
        if thread is owner:
            return  # a portal without a thread: an event loop that hangs refreshes no lease
        answered_at = thread.time()

        def answered() -> None:
            nonlocal answered_at
            answered_at = thread.time()

        while thread.time() - answered_at < hung_s:
            owner.call_soon_threadsafe(thread.call_soon_threadsafe, answered)
            await asyncio.sleep(self._lease.ttl_s / 10)
        logger.error(
            "the event loop has not run for %g s: lease %x is given up", hung_s, self._lease.id
        )
        self._lease.end(LeaseLoss.EXPIRED)


def _log_failure(kept: Future[None]) -> None:
    """Logs that the lease is not refreshed any more, and will expire."""
    if not kept.cancelled() and (failure := kept.exception()) is not None:
        logger.error("the lease is not refreshed any more and will expire", exc_info=failure)


async def _call(portal: Portal, function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """What `function` returns in the portal's event loop; cancelled with its caller."""
    return await asyncio.wrap_future(portal.start_task_soon(function, *args))

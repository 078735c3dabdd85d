"""One etcd lease, which a thread keeps alive: its grant, its refreshes, and its loss.

The event loop of a process may stall for longer than the lease's time-to-live: in an import, a
large request body, a garbage collection. The thread has its own event loop and connection, so
such a stall does not lose the lease. A process whose event loop hangs forever must not stay a
member: the thread gives the lease up when a callback there has not run for `HUNG_S`. Unless it runs
within `END_S` then, the process is ended, so that its supervisor starts another one.

etcd reports a lost lease by a time-to-live of 0, not by an error. Besides, a lease that could
not be refreshed for its whole time-to-live by this host's CLOCK_BOOTTIME counts as lost,
regardless of later replies: other processes may have seen it expire. That clock counts the
time in which the host was suspended. etcd grants whole seconds, and no less than one and a half of
its election timeouts. That may be more than was asked for, but others count on what was asked for.

A store that has lost its data, or was restored from a backup, does not know the lease either.
In this case the lease was not revoked, so this process grants the same id again, as it does with
a lease that has no key yet: no operator sees that one.
"""

import asyncio
import contextlib
import logging
import math
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import aetcd
from aetcd import rpc

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.address import ServerAddress
from dynamo_lite.runtime.etcd.backend import EtcdBackend, Portal
from dynamo_lite.runtime.etcd.client import EtcdClient, details, is_future_revision, status
from dynamo_lite.runtime.store import LeaseLoss
from dynamo_lite.runtime.tasks import all_of

logger = logging.getLogger(__name__)

HUNG_S = 120.0
#: A process that was stopped (SIGSTOP) and goes on has this time to run again.
END_S = 60.0
#: Refreshes are so frequent that an outage of nearly the whole time-to-live does not lose the
#: lease.
_REFRESHES_PER_TTL = 10
_RETRY_S = 0.2

#: ConfigError: the files of TLS are being replaced.
_OUT_OF_REACH = (aetcd.ClientError, rpc.AioRpcError, TimeoutError, ConfigError)


class EtcdLease:
    """Implements `Lease` for its owner, the event loop that made it. All that is async and private
    runs in the thread. id, ttl_s, the deadline and the loss are read by both."""

    id = 0
    #: The boot time until which the lease is certainly alive, unless it was lost before.
    deadline = 0.0
    _client: EtcdClient | None = None

    def __init__(self, address: ServerAddress, ttl_s: float, backend: EtcdBackend, portal: Portal):
        self.ttl_s = ttl_s
        self._address, self._backend, self._portal = address, backend, portal
        self._boottime = backend.clock.boottime
        self._owner = asyncio.get_running_loop()
        self._loss: LeaseLoss | None = None
        self._lost = asyncio.Event()
        #: As `_lost`, for the thread.
        self._ended = asyncio.Event()
        self._refreshing = asyncio.Lock()
        #: The key that was put last under the lease, and its revision: a mark in the history of the
        #: store that granted it. None until there is one.
        self._mark: tuple[bytes, int] | None = None
        #: The highest revision of the store that it was refreshed at.
        self._seen = 0

    def __repr__(self) -> str:
        state = self._loss.value if self._loss else f"{self.remaining_s():.1f} s left"
        return f"EtcdLease({self.id:x}, {state})"

    @property
    def loss(self) -> LeaseLoss | None:
        if self._loss is None and self._boottime() >= self.deadline:
            self.end(LeaseLoss.EXPIRED)
        return self._loss

    def remaining_s(self) -> float:
        return 0.0 if self.loss else max(0.0, self.deadline - self._boottime())

    async def lost(self) -> LeaseLoss:
        await self._lost.wait()
        assert self._loss is not None
        return self._loss

    async def verify(self) -> LeaseLoss | None:
        if self.loss is None:
            await self.call(self._refresh)
        return self.loss

    def holds(self, key: bytes, revision: int) -> None:
        """`key` was put under this lease at `revision`."""
        if self._loss is None:
            self._portal.start_task_soon(setattr, self, "_mark", (key, revision))

    def end(self, loss: LeaseLoss) -> None:
        """Marks the lease as lost. Only the first reason counts."""
        if self._loss is None:
            self._loss = loss
            self._lost.set()
            self._portal.start_task_soon(self._ended.set)

    async def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Runs `function` in the thread; cancelled with its caller."""
        await asyncio.wrap_future(self._portal.start_task_soon(function, *args))

    # In the thread

    async def open(self) -> None:
        """Raises what `EtcdClient.call` raises, and ConfigError."""
        self._client = EtcdClient(self._address, self._backend)
        await self._grant(self.ttl_s)

    async def keep(self) -> None:
        """Returns when the lease is lost."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch_owner())
            await self._keep_alive()
            watch.cancel()

    async def revoke(self) -> None:
        client = self._client
        assert client is not None
        try:
            await client.call(lambda: client.revoke_lease(self.id))
        except _OUT_OF_REACH as exc:
            logger.info("lease %x was not revoked, it expires: %s", self.id, details(exc))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _give_up(self, loss: LeaseLoss) -> None:
        if self._loss is None:
            self._loss = loss
            self._ended.set()
            with contextlib.suppress(RuntimeError):  # the owner's event loop is closed
                self._owner.call_soon_threadsafe(self._lost.set)

    async def _watch_owner(self) -> None:
        """Gives the lease up when the owner's event loop does not answer."""
        thread, hung_s = asyncio.get_running_loop(), max(HUNG_S, self.ttl_s)
        if thread is self._owner:
            return  # a portal without a thread: an event loop that hangs refreshes no lease
        answered_at = thread.time()

        def answered() -> None:
            nonlocal answered_at
            answered_at = thread.time()

        while thread.time() - answered_at < hung_s:
            self._owner.call_soon_threadsafe(thread.call_soon_threadsafe, answered)
            await asyncio.sleep(self.ttl_s / 10)
        end = threading.Timer(END_S, os._exit, (os.EX_TEMPFAIL,))
        end.daemon = True
        end.start()
        self._owner.call_soon_threadsafe(end.cancel)
        self._give_up(LeaseLoss.EXPIRED)
        # Last: it may be the log that hangs.
        logger.error("the event loop has not run for %g s: lease %x is given up", hung_s, self.id)

    async def _keep_alive(self) -> None:
        pause_s = self.ttl_s / _REFRESHES_PER_TTL
        while self._left_s() > 0:
            refreshed = await self._refresh()
            # Never sleep past the deadline: it must be detected at once.
            wait_s = min(pause_s if refreshed else _RETRY_S, pause_s, self._left_s())
            await all_of([self._ended], wait_s)

    def _left_s(self) -> float:
        left_s = self.deadline - self._boottime()
        if left_s <= 0:
            self._give_up(LeaseLoss.EXPIRED)
        return 0.0 if self._loss else left_s

    async def _refresh(self) -> bool:
        """Refreshes once, and sets the deadline or the loss. Returns False if a retry is needed."""
        client, left_s = self._client, self._left_s()
        assert client is not None
        if left_s <= 0:
            return True
        try:
            # One at a time: another one may have just granted the lease again.
            async with asyncio.timeout(left_s), self._refreshing:
                asked_at = self._boottime()
                reply = await client.call(lambda: client.refresh_lease(self.id))
                if reply is None:
                    return False
                if reply.TTL <= 0:
                    return await self._on_unknown()
        except _OUT_OF_REACH as exc:
            logger.debug("lease %x was not refreshed: %s", self.id, exc)
            return False
        self.deadline = max(self.deadline, asked_at + min(self.ttl_s, reply.TTL))
        self._seen = max(self._seen, reply.header.revision)
        return True

    async def _grant(self, ttl_s: float) -> None:
        client, asked_at = self._client, self._boottime()
        assert client is not None
        self._mark, self._seen = None, 0  # now: the answer may not arrive
        granted = await client.call(lambda: client.lease(math.ceil(ttl_s), self.id))
        self.id, self.ttl_s = granted.id, min(ttl_s, granted.ttl)
        self.deadline = max(self.deadline, asked_at + self.ttl_s)

    async def _on_unknown(self) -> bool:
        """etcd does not know the lease: it was revoked, or etcd was wiped."""
        if await self._was_revoked():
            self._give_up(LeaseLoss.REVOKED)
            return True
        with contextlib.suppress(aetcd.DuplicateLeaseError):  # an earlier call had no answer
            await self._grant(self.ttl_s)
            logger.warning("etcd did not know lease %x, which was granted again", self.id)
        return False

    async def _was_revoked(self) -> bool:
        """Whether the store has the history in which the lease had keys. Until it has one no
        process sees this lease, so none has revoked it.

        Revisions and keys alone are not reliable: a wiped store may already be past that of the
        keys, and another process may have put the same key at the same revision.
        """
        client, mark = self._client, self._mark
        assert client is not None
        if mark is None:
            return False
        key, revision = mark
        try:
            reply = await client.range(rpc.RangeRequest(key=key, revision=revision, keys_only=True))
        except rpc.AioRpcError as exc:
            if status(exc) is not rpc.StatusCode.OUT_OF_RANGE:
                raise
            if is_future_revision(exc):  # not yet written
                return False
            # Compacted. A read of the present is never behind what the same store has shown.
            reply = await client.range(rpc.RangeRequest(key=key, keys_only=True))
            return reply.header.revision >= self._seen
        return [kv.lease for kv in reply.kvs] == [self.id]


@contextlib.asynccontextmanager
async def open_lease(
    address: ServerAddress, ttl_s: float, backend: EtcdBackend
) -> AsyncIterator[EtcdLease]:
    """Grants a lease, keeps it alive, and revokes it at the end.

    Raises what `EtcdClient.call` raises when etcd grants none, and ConfigError when a file of
    `address.tls` cannot be read.
    """
    async with backend.open_portal() as portal:
        lease, kept = EtcdLease(address, ttl_s, backend, portal), None
        try:
            await lease.call(lease.open)
            kept = portal.start_task_soon(lease.keep)
            kept.add_done_callback(_log_failure)
            try:
                yield lease
            finally:
                given_back = lease.loss is None
                lease.end(LeaseLoss.CLOSED)
                if given_back:
                    await lease.call(lease.revoke)
        finally:
            if kept is not None:
                kept.cancel()
            await lease.call(lease.close)


def _log_failure(kept: Future[None]) -> None:
    """Logs that the lease is not refreshed any more, and will expire."""
    if not kept.cancelled() and (failure := kept.exception()) is not None:
        logger.error("the lease is not refreshed any more and will expire", exc_info=failure)

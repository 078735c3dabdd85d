"""One etcd lease, which a thread keeps alive: its grant, its refreshes, and its loss.

The event loop of a process may stall for longer than the lease's time-to-live: in an import, a
large request body, a garbage collection. The thread has its own event loop and connection, so
such a stall does not lose the lease. A process whose event loop hangs forever must not stay a
member: the thread gives the lease up when a callback there has not run for `HUNG_S`.

etcd reports a lost lease by a time-to-live of 0, not by an error. Besides, a lease that could
not be refreshed for its whole time-to-live by this host's CLOCK_BOOTTIME counts as lost,
regardless of later replies: other processes may have seen it expire. That clock counts the
time in which the host was suspended. etcd grants whole seconds, and no less than one and a half of
its election timeouts. That may be more than was asked for, but others count on what was asked for.

A store that has lost its data, or was restored from a backup, does not know the lease either.
In this case the lease was not revoked, so this process grants the same id again.
"""

import asyncio
import contextlib
import logging
import math
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
        #: What to read of the past, and the key and revision that were read there.
        self._witness: tuple[Any, tuple[bytes, int]] | None = None
        self._granted_again = False
        self._had_keys = False
        #: It was granted again, and its owner has not put a key back since.
        self._keys_lost = False

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
        """`key` was put under this lease at `revision`: a mark in the store's history."""
        if self._loss is None:
            self._portal.start_task_soon(self._note_key, key, revision)

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
        logger.error("the event loop has not run for %g s: lease %x is given up", hung_s, self.id)
        self._give_up(LeaseLoss.EXPIRED)

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
            # One at a time: otherwise a call that sees the wiped store, while another one has
            # just granted the lease again, would find no witness and report a revocation.
            async with asyncio.timeout(left_s), self._refreshing:
                asked_at = self._boottime()
                reply = await client.call(lambda: client.refresh_lease(self.id))
                if reply is None:
                    return False
                if reply.TTL <= 0:
                    return await self._on_unknown(reply.header)
        except _OUT_OF_REACH as exc:
            logger.debug("lease %x was not refreshed: %s", self.id, exc)
            return False
        self.deadline = max(self.deadline, asked_at + min(self.ttl_s, reply.TTL))
        written = reply.header.revision > self._revision
        self._revision = max(self._revision, reply.header.revision)
        if written and self._witness is None:  # the store was empty at the grant
            await self._mark()
        return True

    async def _grant(self, ttl_s: float) -> None:
        """Asks for the lease, and records in which store's history, and where, it was granted."""
        client, asked_at = self._client, self._boottime()
        assert client is not None
        # Not `client.lease`: its result hides the store's revision.
        request = rpc.LeaseGrantRequest(ID=self.id, TTL=math.ceil(ttl_s))
        granted = await client.call(
            lambda: client.leasestub.LeaseGrant(
                request, timeout=client.timeout_s, metadata=client.metadata
            )
        )
        self.id, self.ttl_s = granted.ID, min(ttl_s, granted.TTL)
        self.deadline = max(self.deadline, asked_at + self.ttl_s)
        self._cluster: int = granted.header.cluster_id
        self._revision: int = granted.header.revision
        self._witness = None
        await self._mark()

    async def _mark(self) -> None:
        """Remembers which key is the newest of the store now, as a mark in its history.

        It serves until the lease has a key of its own (`holds`). Without a mark, a wiped store
        that is already past the lease's revision looks like one in which the lease was revoked.
        """
        assert self._client is not None
        # A backup from before the grant lacks the revision, or has another newest key there.
        try:
            reply = await self._client.range(_newest_at(0))
        except _OUT_OF_REACH as exc:
            logger.debug("lease %x has no mark in the store's history: %s", self.id, exc)
            return
        for kv in reply.kvs:
            if self._witness is None and reply.header.revision >= self._revision:
                then = _newest_at(reply.header.revision)
                self._witness = (then, (kv.key, kv.mod_revision))

    def _note_key(self, key: bytes, revision: int) -> None:
        self._witness = (_key_at(key, revision), (key, revision))
        self._had_keys, self._keys_lost = True, False
        self._revision = max(self._revision, revision)

    async def _on_unknown(self, header: Any) -> bool:
        """etcd does not know the lease: it was revoked, or etcd was wiped."""
        if not await self._was_wiped(header):
            self._give_up(LeaseLoss.REVOKED)
            return True
        try:
            await self._grant(self.ttl_s)
        except rpc.AioRpcError as exc:
            if status(exc) is rpc.StatusCode.FAILED_PRECONDITION:
                return False  # it exists: an earlier call was applied, and had no answer
            raise
        logger.warning("etcd has lost its data; lease %x was granted again", self.id)
        self._granted_again, self._keys_lost = True, self._had_keys
        return True

    async def _was_wiped(self, header: Any) -> bool:
        """Whether the store's history is not the one in which the lease was granted.

        The revision alone is not reliable: a wiped store may already be past it, and one
        member of several may lag behind the others. A mark that is another process's key is not
        reliable in a store that was wiped just now: wiped once more, it may be filled by the same
        puts. Until its keys are back no process sees this lease, so none has revoked it.
        """
        if self._keys_lost:
            return True
        went_back = header.cluster_id != self._cluster or header.revision < self._revision
        witness, client = self._witness, self._client
        assert client is not None
        try:
            reply = await client.range(witness[0] if witness else _key_at(b"\0", self._revision))
        except rpc.AioRpcError as exc:
            match status(exc):
                case rpc.StatusCode.OUT_OF_RANGE:  # not yet written, or compacted
                    return went_back or is_future_revision(exc)
                case rpc.StatusCode.PERMISSION_DENIED:
                    return went_back
                case _:
                    raise
        if witness is None:
            # The store was empty at the grant. One that was wiped just now may be wiped again.
            return header.cluster_id != self._cluster or self._granted_again
        return [(kv.key, kv.mod_revision) for kv in reply.kvs] != [witness[1]]


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


def _key_at(key: bytes, revision: int) -> Any:
    return rpc.RangeRequest(key=key, revision=revision, keys_only=True)


def _newest_at(revision: int) -> Any:
    """The newest key of a revision; 0: of the present one.

    Other puts repeat its name and revision more easily than that there was no newer key later.
    """
    return rpc.RangeRequest(
        key=b"\0",
        range_end=b"\0",
        revision=revision,
        limit=1,
        keys_only=True,
        sort_order=rpc.RangeRequest.DESCEND,
        sort_target=rpc.RangeRequest.MOD,
    )

"""One etcd lease, which is kept alive: its grant, its refreshes, and its loss.

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
from collections.abc import AsyncIterator

from aetcd import rpc

from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.etcd.client import EtcdClient, details, is_future_revision
from dynamo_lite.runtime.store import LeaseLoss
from dynamo_lite.runtime.tasks import all_of, running

logger = logging.getLogger(__name__)

#: Refreshes are so frequent that an outage of nearly the whole time-to-live does not lose the
#: lease.
_REFRESHES_PER_TTL = 10
_RETRY_S = 0.2

_OUT_OF_REACH = (rpc.AioRpcError, TimeoutError)


class EtcdLease:
    """Implements `Lease`."""

    id = 0
    #: The boot time until which the lease is certainly alive, unless it was lost before.
    deadline = 0.0

    def __init__(self, client: EtcdClient, ttl_s: float, clock: Clock):
        self.ttl_s = ttl_s
        self._client, self._boottime = client, clock.boottime
        self._loss: LeaseLoss | None = None
        self._lost = asyncio.Event()
        self._refreshing = asyncio.Lock()
        #: The key that was put last under the lease, and its revision: a mark in the history of the
        #: store that granted it. None until there is one.
        self._mark: tuple[bytes, int] | None = None
        #: The highest revision of the store that it was refreshed at.
        self._seen = 0

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
        await self._refresh()
        return self.loss

    def holds(self, key: bytes, revision: int) -> None:
        """`key` was put under this lease at `revision`."""
        self._mark = key, revision

    def end(self, loss: LeaseLoss) -> None:
        """Marks the lease as lost. Only the first reason counts."""
        if self._loss is None:
            self._loss = loss
            self._lost.set()

    async def keep(self) -> None:
        """Returns when the lease is lost."""
        pause_s = self.ttl_s / _REFRESHES_PER_TTL
        try:
            while self.loss is None:
                refreshed = await self._refresh()
                # Never sleep past the deadline: it must be detected at once.
                wait_s = min(pause_s if refreshed else _RETRY_S, pause_s, self.remaining_s())
                await all_of([self._lost], wait_s)
        finally:
            self.end(LeaseLoss.EXPIRED)  # also after a failure: nobody refreshes it any more

    async def revoke(self) -> None:
        try:
            await self._client.call(rpc.LeaseRevokeRequest(ID=self.id))
        except _OUT_OF_REACH as exc:
            logger.info("lease %x was not revoked, it expires: %s", self.id, details(exc))

    async def _refresh(self) -> bool:
        """Refreshes once, and sets the deadline or the loss. Returns False if a retry is needed."""
        if (left_s := self.remaining_s()) <= 0:
            return True
        try:
            # One at a time: another one may have just granted the lease again.
            async with asyncio.timeout(left_s), self._refreshing:
                asked_at = self._boottime()
                request = rpc.LeaseKeepAliveRequest(ID=self.id)
                # A member that hangs leaves time for another one.
                reply = await self._client.call(request, self.ttl_s / 3)
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

    async def grant(self) -> None:
        """Raises AioRpcError."""
        asked_at = self._boottime()
        self._mark, self._seen = None, 0  # now: the answer may not arrive
        request = rpc.LeaseGrantRequest(TTL=math.ceil(self.ttl_s), ID=self.id)
        granted = await self._client.call(request)
        self.id, self.ttl_s = granted.ID, min(self.ttl_s, granted.TTL)
        self.deadline = max(self.deadline, asked_at + self.ttl_s)

    async def _on_unknown(self) -> bool:
        """etcd does not know the lease: it was revoked, or etcd was wiped."""
        if await self._was_revoked():
            self.end(LeaseLoss.REVOKED)
            return True
        try:
            await self.grant()
            logger.warning("etcd did not know lease %x, which was granted again", self.id)
        except rpc.AioRpcError as exc:
            if exc.code() is not rpc.StatusCode.FAILED_PRECONDITION:
                raise
            # It exists: an earlier call had no answer.
        return False

    async def _was_revoked(self) -> bool:
        """Whether the store has the history in which the lease had keys. Until it has one no
        process sees this lease, so none has revoked it.

        Revisions and keys alone are not reliable: a wiped store may already be past that of the
        keys, and another process may have put the same key at the same revision.
        """
        if self._mark is None:
            return False
        key, revision = self._mark
        request = rpc.RangeRequest(key=key, revision=revision, keys_only=True)
        try:
            reply = await self._client.call(request)
        except rpc.AioRpcError as exc:
            if exc.code() is not rpc.StatusCode.OUT_OF_RANGE:
                raise
            if is_future_revision(exc):  # not yet written
                return False
            # Compacted. A read of the present is never behind what the same store has shown.
            reply = await self._client.call(rpc.RangeRequest(key=key, keys_only=True))
            return reply.header.revision >= self._seen
        return [kv.lease for kv in reply.kvs] == [self.id]


@contextlib.asynccontextmanager
async def open_lease(client: EtcdClient, ttl_s: float, clock: Clock) -> AsyncIterator[EtcdLease]:
    """Grants a lease, keeps it alive, and revokes it at the end.

    Raises AioRpcError when etcd grants none.
    """
    lease = EtcdLease(client, ttl_s, clock)
    await lease.grant()
    async with running(lease.keep(), name=f"lease {lease.id:x}"):
        try:
            yield lease
        finally:
            given_back = lease.loss is None
            lease.end(LeaseLoss.CLOSED)
            if given_back:
                await lease.revoke()

"""One etcd lease: its grant, its refreshes, and the detection of its loss.

etcd reports a lost lease by a time-to-live of 0, not by an error. Besides, a lease that could
not be refreshed for its whole time-to-live by this host's CLOCK_BOOTTIME counts as lost,
regardless of later replies: other processes may have seen it expire. That clock counts the
time in which the host was suspended. etcd grants whole seconds, and no less than one and a half of
its election timeouts. That may be more than was asked for, but others count on what was asked for.

A store that has lost its data, or was restored from a backup, does not know the lease either.
In this case the lease was not revoked, so this process grants the same id again.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

import aetcd
from aetcd import rpc

from dynamo_lite.runtime.etcd.client import EtcdClient, is_future_revision, status
from dynamo_lite.runtime.store import LeaseLoss

logger = logging.getLogger(__name__)

#: Refreshes are so frequent that an outage of nearly the whole time-to-live does not lose the
#: lease.
_REFRESHES_PER_TTL = 10
_RETRY_S = 0.2

_OUT_OF_REACH = (aetcd.ClientError, rpc.AioRpcError, TimeoutError)


class EtcdLease:
    """granted: etcd's answer to the grant of `ttl_s`; granted_at: the `boottime` just before the
    request. boottime: see `Clock`."""

    def __init__(
        self,
        client: EtcdClient,
        granted: Any,
        *,
        ttl_s: float,
        granted_at: float,
        boottime: Callable[[], float],
    ):
        self._client = client
        self._boottime = boottime
        self._id: int = granted.ID
        self._ttl_s = min(ttl_s, granted.TTL)
        self._deadline = granted_at + self._ttl_s
        #: What to read of the past, and the key and revision that were read there.
        self._witness: tuple[Any, tuple[bytes, int]] | None = None
        self._granted_again = False
        self._had_keys = False
        #: It was granted again, and its owner has not put a key back since.
        self._keys_lost = False
        self._loss: LeaseLoss | None = None
        self._lost = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._place(granted.header)

    def __repr__(self) -> str:
        state = self._loss.value if self._loss else f"{self.remaining_s():.1f} s left"
        return f"EtcdLease({self._id:x}, {state})"

    @property
    def id(self) -> int:
        return self._id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @property
    def deadline(self) -> float:
        """The `boottime` until which the lease is certainly alive, unless it was lost before."""
        return self._deadline

    @property
    def known_loss(self) -> LeaseLoss | None:
        """The loss that was detected so far. Unlike `loss` it may be read in any thread."""
        return self._loss

    @property
    def loss(self) -> LeaseLoss | None:
        if self._loss is None and self._boottime() >= self._deadline:
            self.end(LeaseLoss.EXPIRED)
        return self._loss

    def remaining_s(self) -> float:
        return 0.0 if self._loss else max(0.0, self._deadline - self._boottime())

    async def lost(self) -> LeaseLoss:
        await self._lost.wait()
        assert self._loss is not None
        return self._loss

    async def verify(self) -> LeaseLoss | None:
        await self._refresh()
        return self.loss

    def end(self, loss: LeaseLoss) -> None:
        """Marks the lease as lost. Only the first reason counts."""
        if self._loss is None:
            self._loss = loss
            self._lost.set()

    def holds(self, key: bytes, revision: int) -> None:
        """`key` was put under this lease at `revision`: a mark in the store's history."""
        self._witness = (_key_at(key, revision), (key, revision))
        self._had_keys, self._keys_lost = True, False
        self._revision = max(self._revision, revision)

    async def mark(self) -> None:
        """Remembers which key is the newest of the store now, as a mark in its history.

        It serves until the lease has a key of its own (`holds`). Without a mark, a wiped store
        that is already past the lease's revision looks like one in which the lease was revoked.
        """
        # A backup from before the grant lacks the revision, or has another newest key there.
        try:
            reply = await self._client.range(_newest_at(0))
        except _OUT_OF_REACH as exc:
            logger.debug("lease %x has no mark in the store's history: %s", self._id, exc)
            return
        for kv in reply.kvs:
            if self._witness is None and reply.header.revision >= self._revision:
                then = _newest_at(reply.header.revision)
                self._witness = (then, (kv.key, kv.mod_revision))

    async def keep_alive(self) -> None:
        """Refreshes until the lease is lost; the body of the task that owns it."""
        pause_s = self._ttl_s / _REFRESHES_PER_TTL
        while self.loss is None:
            refreshed = await self._refresh()
            wait_s = pause_s if refreshed else min(_RETRY_S, pause_s)
            # Never sleep past the deadline: it must be detected at once.
            wait_s = min(wait_s, self.remaining_s())
            try:
                async with asyncio.timeout(wait_s):
                    await self._lost.wait()
            except TimeoutError:
                continue

    async def _refresh(self) -> bool:
        """Refreshes once, and sets the deadline or the loss. Returns False if a retry is needed."""
        if self.loss is not None:
            return True
        try:
            # One at a time: otherwise a call that sees the wiped store, while another one has
            # just granted the lease again, would find no witness and report a revocation.
            async with asyncio.timeout(self.remaining_s()), self._refreshing:
                asked_at = self._boottime()
                reply = await self._client.call(lambda: self._client.refresh_lease(self._id))
                if reply is None:
                    return False
                if reply.TTL <= 0:
                    return await self._on_unknown(reply.header)
        except _OUT_OF_REACH as exc:
            logger.debug("lease %x was not refreshed: %s", self._id, exc)
            return False
        self._deadline = max(self._deadline, asked_at + min(self._ttl_s, reply.TTL))
        written = reply.header.revision > self._revision
        self._revision = max(self._revision, reply.header.revision)
        if written and self._witness is None:  # the store was empty at the grant
            await self.mark()
        return True

    def _place(self, header: Any) -> None:
        """Records in which store's history, and where, the lease was granted."""
        self._cluster: int = header.cluster_id
        self._revision: int = header.revision
        self._witness = None

    async def _on_unknown(self, header: Any) -> bool:
        """etcd does not know the lease: it was revoked, or etcd was wiped."""
        if not await self._was_wiped(header):
            self.end(LeaseLoss.REVOKED)
            return True
        asked_at = self._boottime()
        try:
            granted = await _ask(self._client, self._ttl_s, lease_id=self._id)
        except rpc.AioRpcError as exc:
            if status(exc) is rpc.StatusCode.FAILED_PRECONDITION:
                return False  # it exists: another call of this process was faster
            raise
        logger.warning("etcd has lost its data; lease %x was granted again", self._id)
        self._deadline = max(self._deadline, asked_at + min(self._ttl_s, granted.TTL))
        self._place(granted.header)
        self._granted_again, self._keys_lost = True, self._had_keys
        await self.mark()
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
        witness = self._witness
        try:
            asked = witness[0] if witness else _key_at(b"\0", self._revision)
            reply = await self._client.range(asked)
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


async def grant_lease(client: EtcdClient, ttl_s: float, boottime: Callable[[], float]) -> EtcdLease:
    """Raises what `EtcdClient.call` raises."""
    asked_at = boottime()
    granted = await _ask(client, ttl_s)
    lease = EtcdLease(client, granted, ttl_s=ttl_s, granted_at=asked_at, boottime=boottime)
    await lease.mark()
    return lease


async def _ask(client: EtcdClient, ttl_s: float, *, lease_id: int = 0) -> Any:
    # Not `client.lease`: its result hides the store's revision.
    request = rpc.LeaseGrantRequest(ID=lease_id, TTL=math.ceil(ttl_s))
    return await client.call(
        lambda: client.leasestub.LeaseGrant(
            request, timeout=client.timeout_s, metadata=client.metadata
        )
    )

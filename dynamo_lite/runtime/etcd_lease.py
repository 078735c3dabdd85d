"""One etcd lease: granted, kept alive, and noticed when it is gone.

etcd says that a lease is gone by a time-to-live of 0, not by an error. Besides,
a lease that could not be refreshed for its whole time-to-live counts as lost by
this process's own monotonic clock, whatever the server says later: others may
have seen it expire.
"""

import asyncio
import logging
import time
from typing import Any

import aetcd
from aetcd import rpc

from dynamo_lite.runtime.store import LeaseLoss

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_REFRESHES_PER_TTL = 3


class EtcdLease:
    """`granted_at` is the monotonic time just before the grant was sent, `revision` the
    store's revision just after it."""

    def __init__(
        self, client: Any, lease_id: int, ttl_s: float, *, granted_at: float, revision: int
    ):
        self._client = client
        self._id = lease_id
        self._ttl_s = ttl_s
        self._revision = revision
        self._deadline = granted_at + ttl_s
        self._loss: LeaseLoss | None = None
        self._lost = asyncio.Event()

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
    def loss(self) -> LeaseLoss | None:
        if self._loss is None and time.monotonic() >= self._deadline:
            self.end(LeaseLoss.EXPIRED)
        return self._loss

    def remaining_s(self) -> float:
        return 0.0 if self._loss else max(0.0, self._deadline - time.monotonic())

    async def lost(self) -> LeaseLoss:
        await self._lost.wait()
        assert self._loss is not None
        return self._loss

    async def verify(self) -> LeaseLoss | None:
        await self._refresh()
        return self.loss

    def end(self, loss: LeaseLoss) -> None:
        """Marks the lease as gone; the first reason stays."""
        if self._loss is None:
            self._loss = loss
            self._lost.set()

    async def keep_alive(self) -> None:
        """Refreshes until the lease is lost; the body of the task that owns it."""
        pause_s = self._ttl_s / _REFRESHES_PER_TTL
        while self.loss is None:
            refreshed = await self._refresh()
            wait_s = pause_s if refreshed else min(_RETRY_S, pause_s)
            # Never sleep past the deadline: its passing must be noticed at once.
            wait_s = min(wait_s, self.remaining_s())
            try:
                async with asyncio.timeout(wait_s):
                    await self._lost.wait()
            except TimeoutError:
                continue

    async def _refresh(self) -> bool:
        """Whether the store answered. Sets the deadline or the loss from the answer."""
        if self.loss is not None:
            return True
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(self.remaining_s()):
                reply = await self._client.call(lambda: self._client.refresh_lease(self._id))
        except (aetcd.ClientError, rpc.AioRpcError, TimeoutError) as exc:
            logger.debug("lease %x was not refreshed: %s", self._id, exc)
            return False
        if reply is None:
            return False
        if reply.TTL > 0:
            self._deadline = max(self._deadline, asked_at + reply.TTL)
            self._revision = max(self._revision, reply.header.revision)
        elif self.loss is None:
            # A store that went back in time was wiped or restored: nobody asked this
            # process to leave, and it may come back.
            wiped = reply.header.revision < self._revision
            self.end(LeaseLoss.EXPIRED if wiped else LeaseLoss.REVOKED)
        return True

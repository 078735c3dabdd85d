"""A lease of the simulated etcd, kept alive as the one of the real etcd is."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.runtime.store import LeaseLoss
from dynamo_lite.simulation.servers.etcd import Place

logger = logging.getLogger(__name__)

_REFRESHES_PER_TTL = 10
_RETRY_S = 0.2


class SimLease:
    """call: asks the store; granted: its answer to the grant; granted_at: the time just
    before that was asked for."""

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        monotonic: Callable[[], float],
        granted: tuple[int, int, Place],
        *,
        granted_at: float,
    ):
        self._call = call
        self._monotonic = monotonic
        self._id, self._ttl_s, self._place = granted
        self._deadline = granted_at + self._ttl_s
        self._loss: LeaseLoss | None = None
        self._lost = asyncio.Event()

    def __repr__(self) -> str:
        state = self._loss.value if self._loss else f"{self.remaining_s():.1f} s left"
        return f"SimLease({self._id:x}, {state})"

    @property
    def id(self) -> int:
        return self._id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @property
    def loss(self) -> LeaseLoss | None:
        if self._loss is None and self._monotonic() >= self._deadline:
            self.end(LeaseLoss.EXPIRED)
        return self._loss

    def remaining_s(self) -> float:
        return 0.0 if self._loss else max(0.0, self._deadline - self._monotonic())

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
        """Whether the store settled it. Sets the deadline or the loss from its answer."""
        if self.loss is not None:
            return True
        asked_at = self._monotonic()
        try:
            async with asyncio.timeout(self.remaining_s()):
                ttl_s, place = await self._call("refresh", self._id)
                if ttl_s <= 0:
                    return await self._on_unknown(place)
        except (StoreUnavailable, TimeoutError) as exc:
            logger.debug("lease %x was not refreshed: %s", self._id, exc)
            return False
        self._deadline = max(self._deadline, asked_at + ttl_s)
        return True

    async def _on_unknown(self, place: Place) -> bool:
        """The store does not know the lease: it was revoked, or the store was wiped."""
        if place.cluster == self._place.cluster:
            self.end(LeaseLoss.REVOKED)
            return True
        asked_at = self._monotonic()
        granted = await self._call("grant", self._ttl_s, self._id)
        if granted is None:
            return False  # it exists: another of our calls was faster
        logger.warning("etcd has lost its data; lease %x is granted anew", self._id)
        _, ttl_s, self._place = granted
        self._deadline = max(self._deadline, asked_at + ttl_s)
        return True

"""A lease of the in-process store."""

import asyncio
import contextlib
import itertools
from typing import Protocol

from dynamo_lite.runtime.store import LeaseLoss

_REFRESHES_PER_TTL = 10
_lease_ids = itertools.count(0x1A2B3C01)


class LeaseSide(Protocol):
    """What a lease needs of its store."""

    @property
    def available(self) -> bool: ...

    def now(self) -> float: ...

    def admit(self, lease: "MemoryLease") -> None: ...

    def end_lease(self, lease: "MemoryLease", loss: LeaseLoss) -> None: ...


class MemoryLease:
    """A lease of a `MemoryStore`."""

    def __init__(self, store: LeaseSide, ttl_s: float):
        self._store = store
        self._id = next(_lease_ids)
        self._ttl_s = ttl_s
        self._deadline = store.now() + ttl_s
        self._loss: LeaseLoss | None = None
        self._lost = asyncio.Event()

    @property
    def id(self) -> int:
        return self._id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

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
            self._deadline = self._store.now() + self._ttl_s

    def end(self, loss: LeaseLoss) -> None:
        if self._loss is None:
            self._loss = loss
            self._lost.set()

    async def keep_alive(self) -> None:
        while self.loss is None:
            self.refresh()
            pause_s = min(self._ttl_s / _REFRESHES_PER_TTL, max(self.remaining_s(), 0.001))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._lost.wait()

"""Follows what decode engines say of the prefill queue."""

import contextlib
from collections.abc import AsyncIterator, Callable

from dynamo_lite.policy.backlog import Backlogs, BacklogTotals
from dynamo_lite.protocol import names
from dynamo_lite.protocol.backlog import Backlog, decode_demand
from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.messaging import Messaging

#: Takes a notice that was news, and the tokens that have come since the one before.
OnDemand = Callable[[Backlog, int], None]


class BacklogFollower:
    """now: monotonic. own: an engine whose notices do not count."""

    def __init__(
        self,
        namespace: str,
        now: Callable[[], float],
        *,
        own: str = "",
        on_demand: OnDemand = lambda demand, done_tokens: None,
        on_drop: OnDrop = uncounted,
    ):
        self.subject = names.demand_subject(namespace)
        self._now, self._own, self._on_demand, self._on_drop = now, own, on_demand, on_drop
        self._demands = Backlogs()

    @contextlib.asynccontextmanager
    async def follow(self, messaging: Messaging) -> AsyncIterator[None]:
        """What was said before is known within a second."""
        handler = counted(self._hear, "demand", self._on_drop)
        async with messaging.serve(self.subject, handler):
            yield

    def totals(self) -> BacklogTotals:
        """Of all engines that were heard lately."""
        return self._demands.totals(self._now())

    async def _hear(self, payload: bytes) -> None:
        demand = decode_demand(payload)
        if demand.engine_id == self._own or demand.wire_version != WIRE_VERSION:
            return
        done_tokens = self._demands.hear(demand, self._now())
        if done_tokens is not None:
            self._on_demand(demand, done_tokens)

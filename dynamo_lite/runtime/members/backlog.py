"""Follows the reports of decode engines about their jobs in the prefill queue."""

import contextlib
from collections.abc import AsyncIterator, Callable

from dynamo_lite.policy.decision.backlog import Backlogs, BacklogTotals
from dynamo_lite.protocol import names
from dynamo_lite.protocol.backlog import Backlog, decode_backlog
from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.messaging import Messaging

#: Takes a new report, and the tokens that were prefilled since the report before.
OnBacklog = Callable[[Backlog, int], None]


class BacklogFollower:
    """now: monotonic seconds. own: id of an engine whose reports are ignored."""

    def __init__(
        self,
        namespace: str,
        now: Callable[[], float],
        *,
        own: str = "",
        on_backlog: OnBacklog = lambda backlog, done_tokens: None,
        on_drop: OnDrop = uncounted,
    ):
        self.subject = names.backlog_subject(namespace)
        self._now, self._own, self._on_backlog, self._on_drop = now, own, on_backlog, on_drop
        self._backlogs = Backlogs()

    @contextlib.asynccontextmanager
    async def follow(self, messaging: Messaging) -> AsyncIterator[None]:
        """Follows while the context lasts. Engines report every second, so `totals` is complete
        after that."""
        handler = counted(self._on_report, "demand", self._on_drop)
        async with messaging.serve(self.subject, handler):
            yield

    def totals(self) -> BacklogTotals:
        """The totals of all engines with a recent report."""
        return self._backlogs.totals(self._now())

    @property
    def engines(self) -> int:
        """How many engines have sent a recent report."""
        return self._backlogs.engines(self._now())

    def before(self, engine_id: str) -> int:
        """How many engines with a recent report have a smaller id."""
        return self._backlogs.before(engine_id, self._now())

    async def _on_report(self, payload: bytes) -> None:
        backlog = decode_backlog(payload)
        if backlog.engine_id == self._own or backlog.wire_version != WIRE_VERSION:
            return
        done_tokens = self._backlogs.hear(backlog, self._now())
        if done_tokens is not None:
            self._on_backlog(backlog, done_tokens)

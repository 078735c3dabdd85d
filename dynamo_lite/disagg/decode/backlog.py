"""The backlog of this decode engine, published to the other engines, and theirs.

A job counts from its allocation to the end of its remote prefill, however that ends.
Changes are published at once; changes within a short time are published together, and the
more engines there are, the longer that time is. The whole backlog is also published every
second, which repairs lost messages.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.policy.decision.backlog import (
    IDLE_PERIOD_S,
    BacklogTotals,
    DrainRate,
    notice_period_s,
    wait_s,
)
from dynamo_lite.protocol.backlog import Backlog, Lane
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.members.backlog import BacklogFollower
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import OnFailure, log_failure, running

logger = logging.getLogger(__name__)


class BacklogExchange:
    """Methods run on the bridge's thread unless they say otherwise.

    workers: how many prefill workers are usable. now: monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        prefills: RemotePrefills,
        workers: Callable[[], int],
        now: Callable[[], float],
        on_drop: OnDrop = uncounted,
    ):
        assert isinstance(config.role, DecodeEngineConfig)
        self._engine_id, self._queue = config.engine_id, config.role.queue
        self._prefills, self._workers, self._now = prefills, workers, now
        self._follower = BacklogFollower(
            config.namespace,
            now,
            own=config.engine_id,
            on_backlog=self._on_backlog,
            on_drop=on_drop,
        )
        self._others = BacklogTotals()
        self._drain = DrainRate()
        self._number = self._done_tokens = 0
        self._changed = asyncio.Event()
        self._hello = True

    def lane_of(self, tokens: int, priority: int) -> Lane:
        """Any thread."""
        return self._queue.lane_of(tokens, priority)

    def expected(
        self, tokens: int, priority: int, workers: int
    ) -> tuple[BacklogTotals, float | None]:
        """The backlog of all engines, and how many seconds a prompt with this many uncached tokens
        is expected to wait for `workers`; None without a measured rate. Any thread."""
        totals, rate = self._totals(), self._drain.tokens_per_s(self._now())
        lane = self._queue.lane_of(tokens, priority)
        return totals, wait_s(totals, lane, rate=rate, workers=workers)

    @property
    def rank(self) -> int:
        """How many live engines come before this one."""
        return self._follower.before(self._engine_id)

    async def publish_soon(self) -> None:
        """`changed`, as a coroutine for the bridge."""
        self.changed()

    @contextlib.asynccontextmanager
    async def running(
        self, messaging: Messaging, on_failure: OnFailure = log_failure
    ) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._follower.follow(messaging))
            stack.enter_context(messaging.watch_connection(self._on_connection))
            try:
                publishing = self._publish_changes(messaging)
                async with running(publishing, name="backlog", on_failure=on_failure):
                    yield
            finally:
                await self._publish(messaging, leaving=True)

    def changed(self) -> None:
        """The backlog of this engine has changed."""
        done_tokens = self._prefills.received_tokens
        self._measure_drain(done_tokens - self._done_tokens)
        self._done_tokens = done_tokens
        self._changed.set()

    def _totals(self) -> BacklogTotals:
        """Returns the totals of all engines: this one's exact backlog and the others' last
        messages."""
        return self._prefills.backlog()[0] + self._others

    def _measure_drain(self, done_tokens: int) -> None:
        self._drain.moved(
            self._now(),
            done_tokens=done_tokens,
            claimed_jobs=self._totals().claimed_jobs,
            workers=self._workers(),
        )

    def _on_backlog(self, backlog: Backlog, done_tokens: int) -> None:
        self._others = self._follower.totals()
        self._measure_drain(done_tokens)
        if backlog.hello:
            self._changed.set()

    def _on_connection(self, up: bool) -> None:
        if up:
            self._hello = True
            self._changed.set()

    async def _publish_changes(self, messaging: Messaging) -> None:
        while True:
            self._changed.clear()
            await self._publish(messaging)
            period_s = notice_period_s(self._follower.engines + 1)
            await asyncio.sleep(period_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_PERIOD_S - period_s):
                    await self._changed.wait()
            self._others = self._follower.totals()

    async def _publish(self, messaging: Messaging, *, leaving: bool = False) -> None:
        totals, done_tokens = self._prefills.backlog()
        self._number += 1
        hello, self._hello = self._hello, False
        backlog = Backlog(
            engine_id=self._engine_id,
            number=self._number,
            queued_jobs=totals.queued_jobs,
            queued_tokens=dict(totals.queued_tokens),
            claimed_jobs=totals.claimed_jobs,
            claimed_tokens=totals.claimed_tokens,
            done_tokens=done_tokens,
            asked_tokens=totals.asked_tokens,
            overflow_tokens=totals.overflow_tokens,
            hello=hello,
            leaving=leaving,
        )
        try:
            await messaging.publish(self._follower.subject, encode(backlog))
        except DynamoLiteError as exc:
            logger.debug("publishing the backlog failed: %s", exc)


def job_tokens(job: RemotePrefillRequest) -> int:
    """Prompt tokens that the decode engine does not have."""
    return len(job.prompt_token_ids) - job.num_computed_tokens

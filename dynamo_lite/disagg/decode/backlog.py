"""What this decode engine wants of prefill workers, told to the others; what they want.

An entry lives from the job's allocation to the end of its remote prefill, however that
ends. Changes are told at once, several that come together as one; and everything is
told each second, which makes good what was lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.policy.backlog import BacklogTotals, DrainRate, wait_s
from dynamo_lite.policy.disagg import QueueView
from dynamo_lite.protocol.backlog import Backlog, Lane
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.members.backlog import BacklogFollower
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import running

logger = logging.getLogger(__name__)

#: Everything is told so often at least, and at most.
_IDLE_PERIOD_S, _PERIOD_S = 1.0, 0.02


class BacklogExchange:
    """Methods run on the bridge's thread unless they say otherwise.

    workers: how many prefill workers respond. now: monotonic.
    """

    def __init__(
        self,
        link: EngineConfig,
        prefills: RemotePrefills,
        workers: Callable[[], int],
        now: Callable[[], float],
        on_drop: OnDrop = uncounted,
    ):
        assert isinstance(link.role, DecodeEngineConfig)
        self._engine_id, self._queue = link.engine_id, link.role.queue
        self._prefills, self._workers, self._now = prefills, workers, now
        self._follower = BacklogFollower(
            link.namespace, now, own=link.engine_id, on_demand=self._heard, on_drop=on_drop
        )
        self._others = BacklogTotals()
        self._drain = DrainRate()
        self._number = self._done_tokens = 0
        self._changed = asyncio.Event()
        self._hello = True

    def lane_of(self, tokens: int, priority: int) -> Lane:
        """Any thread."""
        return self._queue.lane_of(tokens, priority)

    def view(self, seen: QueueView, tokens: int, priority: int) -> QueueView:
        """`seen`, with the wait that a prompt with this many tokens has to expect. Any thread."""
        totals, rate = self._totals(), self._drain.tokens_per_s(self._now())
        jobs = max(seen.jobs, totals.jobs)
        lane = self._queue.lane_of(tokens, priority)
        waits_s = wait_s(totals, lane, rate=rate, workers=seen.prefill_workers)
        takes_s = None if waits_s is None or rate is None else waits_s + tokens / rate
        return replace(seen, jobs=jobs, tokens=totals.tokens, wait_s=waits_s, takes_s=takes_s)

    async def tell(self) -> None:
        self.stirred()

    @contextlib.asynccontextmanager
    async def running(self, messaging: Messaging) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._follower.follow(messaging))
            stack.enter_context(messaging.watch_connection(self._on_connection))
            try:
                async with running(self._tell(messaging), name="prefill-demand"):
                    yield
            finally:
                await self._say(messaging, leaving=True)

    def stirred(self) -> None:
        """Something of this engine's own has changed."""
        done_tokens = self._prefills.received_tokens
        self._moved(done_tokens - self._done_tokens)
        self._done_tokens = done_tokens
        self._changed.set()

    def _totals(self) -> BacklogTotals:
        """Of all engines: exactly of this one, of others as they said last."""
        return self._prefills.backlog()[0] + self._others

    def _moved(self, done_tokens: int) -> None:
        self._drain.moved(
            self._now(),
            done_tokens=done_tokens,
            claimed_jobs=self._totals().claimed_jobs,
            workers=self._workers(),
        )

    def _heard(self, demand: Backlog, done_tokens: int) -> None:
        self._others = self._follower.totals()
        self._moved(done_tokens)
        if demand.hello:
            self._changed.set()

    def _on_connection(self, up: bool) -> None:
        if up:
            self._hello = True
            self._changed.set()

    async def _tell(self, messaging: Messaging) -> None:
        while True:
            self._changed.clear()
            await self._say(messaging)
            await asyncio.sleep(_PERIOD_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_PERIOD_S):
                    await self._changed.wait()
            self._others = self._follower.totals()

    async def _say(self, messaging: Messaging, *, leaving: bool = False) -> None:
        totals, done_tokens = self._prefills.backlog()
        self._number += 1
        hello, self._hello = self._hello, False
        demand = Backlog(
            engine_id=self._engine_id,
            number=self._number,
            queued_jobs=totals.queued_jobs,
            queued_tokens=dict(totals.queued_tokens),
            claimed_jobs=totals.claimed_jobs,
            claimed_tokens=totals.claimed_tokens,
            done_tokens=done_tokens,
            hello=hello,
            leaving=leaving,
        )
        try:
            await messaging.publish(self._follower.subject, encode(demand))
        except DynamoLiteError as exc:
            logger.debug("demand not told: %s", exc)


def job_tokens(job: RemotePrefillRequest) -> int:
    """Prompt tokens that the decode engine does not have."""
    return len(job.prompt_token_ids) - job.num_computed_tokens

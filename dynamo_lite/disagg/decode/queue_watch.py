"""What this engine knows of the prefill queue: the queue view.

The engine with the smallest id reads the queue depth from the broker and publishes it to all
others. An engine that gets no reading for a while asks the broker itself. So the broker answers
only a few requests per second, however many engines there are. The broker itself enforces the hard
cap.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.policy.decision.backlog import reads_after_s
from dynamo_lite.protocol import names
from dynamo_lite.protocol.backlog import QueueReading, decode_queue_reading
from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.queue.base import PrefillQueue, QueueDepth
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import OnFailure, log_failure, running

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueueView:
    """A reading of the queue, and the prefill workers as they are now."""

    #: Jobs waiting and in flight when the queue was read.
    jobs: int
    #: Number of prefill workers that respond and have no known failed link to this engine.
    prefill_workers: int
    #: Monotonic seconds.
    read_at: float
    #: Number of prefill workers that respond.
    prefill_workers_alive: int = 0


class QueueWatch:
    """Runs on the bridge's thread; any thread may read `view`.

    workers: the prefill workers. rank: how many live decode engines come before this one. now:
    monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: PrefillWorkers,
        live: LiveThresholds,
        rank: Callable[[], int],
        now: Callable[[], float],
        on_drop: OnDrop = uncounted,
    ):
        #: The last reading of the queue. Replaced as a whole.
        self.view: QueueView | None = None
        self._engine_id, self._subject = config.engine_id, names.depth_subject(config.namespace)
        self._workers, self._live, self._rank = workers, live, rank
        self._now, self._on_drop = now, on_drop
        self._heard = asyncio.Event()
        #: Whether this engine's own connection to the queue is in doubt.
        self._in_doubt = False

    @contextlib.asynccontextmanager
    async def running(
        self, queue: PrefillQueue, messaging: Messaging, on_failure: OnFailure = log_failure
    ) -> AsyncIterator[None]:
        async def on_reading(payload: bytes) -> None:
            self._on_reading(decode_queue_reading(payload), queue)

        handler = counted(on_reading, "queue_reading", self._on_drop)
        async with (
            messaging.serve(self._subject, handler),
            running(self._watch(queue, messaging), name="queue-view", on_failure=on_failure),
        ):
            yield

    def workers_changed(self) -> None:
        """Updates the counts of prefill workers in `view`, so that decisions see them at once."""
        if self.view is not None:
            self.view = self._with_workers(self.view)

    def doubt(self) -> None:
        """A push has failed. Other engines may still reach the queue, so their readings are
        ignored until this engine has read the depth itself."""
        self._in_doubt = True

    async def _watch(self, queue: PrefillQueue, messaging: Messaging) -> None:
        while True:
            await self._read(queue, messaging)
            while await self._hears_within(self._patience_s()):
                pass

    def _patience_s(self) -> float:
        rank = 0 if self._in_doubt else self._rank()
        return reads_after_s(rank, self._live.now.queue_view_max_age_s)

    async def _hears_within(self, seconds: float) -> bool:
        """Whether another engine's reading comes in this time."""
        self._heard.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._heard.wait()
        return False

    async def _read(self, queue: PrefillQueue, messaging: Messaging) -> None:
        read_at = self._now()
        try:
            depth = await queue.depth()
            self._in_doubt = False
            if self._see(depth.total, read_at) and depth.identity:
                await messaging.publish(self._subject, encode(self._reading(depth, read_at)))
        except DynamoLiteError as exc:
            logger.debug("reading the queue depth failed: %s", exc)

    def _reading(self, depth: QueueDepth, read_at: float) -> QueueReading:
        return QueueReading(
            engine_id=self._engine_id,
            jobs=depth.total,
            identity=depth.identity,
            age_s=min(max(self._now() - read_at, 0.0), 3600.0),
        )

    def _on_reading(self, reading: QueueReading, queue: PrefillQueue) -> None:
        """The reading's transport time is unknown, and neglected: it is some milliseconds."""
        if reading.engine_id == self._engine_id or reading.wire_version != WIRE_VERSION:
            return
        queue.heard(reading.identity)
        if not self._in_doubt and self._see(reading.jobs, self._now() - reading.age_s):
            self._heard.set()

    def _see(self, jobs: int, read_at: float) -> bool:
        """Updates `view` if the reading is not older than the last one. Returns whether it did."""
        if self.view is not None and read_at < self.view.read_at:
            return False
        self.view = self._with_workers(QueueView(jobs, 0, read_at))
        return True

    def _with_workers(self, view: QueueView) -> QueueView:
        return replace(
            view,
            prefill_workers=len(self._workers.usable),
            prefill_workers_alive=len(self._workers.responsive),
        )

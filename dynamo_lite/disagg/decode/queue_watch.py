"""What this engine knows of the prefill queue: the queue view.

One engine reads the queue from the broker and publishes the reading to all others: who has read
last reads again. Another engine reads when it has heard no reading for longer, each for another
time, so that one takes over. So the broker answers only a few requests per second, however many
engines there are. The broker itself enforces the hard cap.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.disagg.queue.base import PrefillQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.queue import QueueReading, decode_queue_reading
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import OnFailure, log_failure, running

logger = logging.getLogger(__name__)

#: The time between two readings of the engine that reads.
_PERIOD_S = 0.25
#: The others wait at least this long for a reading, and at most half of `queue-view-max-age-s`.
_PATIENCE_S = 0.4
#: Bytes of a job for each token to compute, until this engine has pushed some: a token id of a
#: large vocabulary has 3 to 5.
_BYTES_PER_TOKEN = 4.0
#: Factor on the weight of all earlier jobs when one is pushed: about the last ten count.
_FADE = 0.9


@dataclass(frozen=True)
class QueueView:
    """A reading of the queue, and the prefill workers as they are now."""

    #: Jobs waiting and in flight when the queue was read, and their tokens to compute.
    jobs: int
    tokens: int
    #: Monotonic seconds.
    read_at: float
    #: Number of prefill workers that respond and have no known failed link to this engine.
    prefill_workers: int = 0
    #: Number of prefill workers that respond.
    prefill_workers_alive: int = 0


class QueueWatch:
    """Runs on the bridge's thread; any thread may read `view`.

    workers: the prefill workers. now: monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: PrefillWorkers,
        live: LiveThresholds,
        now: Callable[[], float],
        on_drop: OnDrop = uncounted,
    ):
        self._engine_id = config.engine_id
        self._subject = names.depth_subject(config.namespace)
        self._workers, self._live = workers, live
        self._now, self._on_drop = now, on_drop
        #: The last reading; None before the first one. Decisions read it in one step.
        self.view: QueueView | None = None
        #: Another engine's reading was heard.
        self._heard = asyncio.Event()
        #: Whether this engine's own connection to the queue is in doubt.
        self._in_doubt = False
        #: Engines wait for different times, and a run can be repeated.
        self._random = random.Random(config.engine_id)
        #: Tokens to compute and bytes of the jobs that this engine has pushed, fading.
        self._pushed_tokens, self._pushed_bytes = 1.0, _BYTES_PER_TOKEN

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

    @property
    def fresh(self) -> QueueView | None:
        """The view, unless it is too old. Any thread."""
        view, longest_s = self.view, self._live.now.queue_view_max_age_s
        return None if view is None or self._now() - view.read_at > longest_s else view

    def workers_changed(self) -> None:
        """Updates the counts of prefill workers in `view`, so that decisions see them at once."""
        if self.view is not None:
            self.view = self._with_workers(self.view)

    def pushed(self, tokens: int, size: int) -> None:
        """This engine has pushed a job. tokens: to compute. size: in bytes."""
        self._pushed_tokens = _FADE * self._pushed_tokens + tokens
        self._pushed_bytes = _FADE * self._pushed_bytes + size

    def doubt(self) -> None:
        """A push has failed. Other engines may still reach the queue, so their readings are
        ignored until this engine has read the queue itself."""
        self._in_doubt = True

    async def _watch(self, queue: PrefillQueue, messaging: Messaging) -> None:
        while True:
            await self._read(queue, messaging)
            patience_s = _PERIOD_S
            while await self._hears_within(patience_s):
                longest_s = max(self._live.now.queue_view_max_age_s / 2, _PATIENCE_S)
                patience_s = self._random.uniform(_PATIENCE_S, longest_s)

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
            tokens = round(depth.size * self._pushed_tokens / self._pushed_bytes)
            if self._see(depth.total, tokens, read_at) and depth.identity:
                reading = QueueReading(
                    engine_id=self._engine_id,
                    jobs=depth.total,
                    tokens=tokens,
                    identity=depth.identity,
                    age_s=min(max(self._now() - read_at, 0.0), 3600.0),
                )
                await messaging.publish(self._subject, encode(reading))
        except DynamoLiteError as exc:
            logger.debug("reading the queue failed: %s", exc)

    def _on_reading(self, reading: QueueReading, queue: PrefillQueue) -> None:
        """The reading's transport time is unknown, and neglected: it is some milliseconds."""
        if reading.engine_id == self._engine_id or reading.wire_version != WIRE_VERSION:
            return
        queue.heard(reading.identity)
        read_at = self._now() - reading.age_s
        if not self._in_doubt and self._see(reading.jobs, reading.tokens, read_at):
            self._heard.set()

    def _see(self, jobs: int, tokens: int, read_at: float) -> bool:
        """Updates `view` if the reading is not older than the last one. Returns whether it did."""
        if self.view is not None and read_at < self.view.read_at:
            return False
        self.view = self._with_workers(QueueView(jobs, tokens, read_at))
        return True

    def _with_workers(self, view: QueueView) -> QueueView:
        return replace(
            view,
            prefill_workers=len(self._workers.usable),
            prefill_workers_alive=len(self._workers.responsive),
        )

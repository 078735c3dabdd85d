"""What this engine knows of the prefill queue: the queue view.

Each engine reads the queue from the broker, which enforces the hard cap itself.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_lite.disagg.queue.base import PrefillQueue
from dynamo_lite.protocol.errors import DynamoLiteError

logger = logging.getLogger(__name__)

#: The time between two readings.
_PERIOD_S = 0.25
#: Bytes of a job for each token to compute, until this engine has pushed some: a token id of a
#: large vocabulary has 3 to 5.
_BYTES_PER_TOKEN = 4.0
#: Factor on the weight of all earlier jobs when one is pushed: about the last ten count.
_FADE = 0.9


@dataclass(frozen=True)
class QueueView:
    """A reading of the queue: jobs waiting and in flight, and their tokens to compute."""

    jobs: int
    tokens: int
    #: Monotonic seconds.
    read_at: float


class QueueWatch:
    """Runs on the bridge's thread; any thread may read `view`. now: monotonic."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        #: The last reading; None before the first one. Decisions read it in one step.
        self.view: QueueView | None = None
        #: Tokens to compute and bytes of the jobs that this engine has pushed, fading.
        self._pushed_tokens, self._pushed_bytes = 1.0, _BYTES_PER_TOKEN

    def pushed(self, tokens: int, size: int) -> None:
        """This engine has pushed a job. tokens: to compute. size: in bytes."""
        self._pushed_tokens = _FADE * self._pushed_tokens + tokens
        self._pushed_bytes = _FADE * self._pushed_bytes + size

    async def watch(self, queue: PrefillQueue) -> None:
        """Reads the queue from time to time, without end."""
        while True:
            read_at = self._now()
            try:
                depth = await queue.depth()
            except DynamoLiteError as exc:
                logger.debug("reading the queue failed: %s", exc)
            else:
                tokens = round(depth.size * self._pushed_tokens / self._pushed_bytes)
                self.view = QueueView(depth.jobs, tokens, read_at)
            await asyncio.sleep(_PERIOD_S)

"""What this engine knows of the prefill queue: the queue view.

Each engine reads the queue from the broker, which enforces the hard cap itself.
"""

import asyncio
import logging
from collections import deque
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
#: How many of the last jobs count.
_LAST = 10


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
        #: Tokens to compute and bytes of each of the last jobs that this engine has pushed.
        self.pushed = deque[tuple[int, int]](maxlen=_LAST)

    async def watch(self, queue: PrefillQueue) -> None:
        """Reads the queue from time to time, without end."""
        while True:
            read_at = self._now()
            try:
                depth = await queue.depth()
            except DynamoLiteError as exc:
                logger.debug("reading the queue failed: %s", exc)
            else:
                self.view = QueueView(depth.jobs, self._tokens(depth.size), read_at)
            await asyncio.sleep(_PERIOD_S)

    def _tokens(self, size: int) -> int:
        """Estimates the tokens to compute of jobs with `size` bytes."""
        if not self.pushed:
            return round(size / _BYTES_PER_TOKEN)
        tokens, sizes = zip(*self.pushed, strict=True)
        return round(size * sum(tokens) / sum(sizes))

"""The dashboard's viewers and the one observer that they share.

The observer runs while there are viewers and a little longer, so that a reloaded page has
its rates at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import msgspec

from dynamo_lite.overview.observer import Observer
from dynamo_lite.protocol.errors import DynamoLiteError, Overloaded
from dynamo_lite.runtime.tasks import end_tasks

logger = logging.getLogger(__name__)

_MOST = 16
_PERIOD_S = 1.0
_LINGER_S = 10.0
_RETRY_S = 2.0


class Viewers:
    """Runs the observer for all viewers; `close` ends their streams.

    Args:
        most: viewers at a time.
        period_s: time between two frames.
        linger_s: how long the observer runs on without viewers.
        retry_s: pause after an error.
    """

    def __init__(
        self,
        open_observer: Callable[[], AbstractAsyncContextManager[Observer]],
        *,
        most: int = _MOST,
        period_s: float = _PERIOD_S,
        linger_s: float = _LINGER_S,
        retry_s: float = _RETRY_S,
    ):
        self._open_observer = open_observer
        self._most, self._period_s, self._linger_s = most, period_s, linger_s
        self._retry_s = retry_s
        self._count = 0
        self._left_at = 0.0
        self._frame: bytes | None = None
        self._new_frame = asyncio.Event()
        #: The observer's. `looking` asks the task itself: OwnedTasks notice an end a turn later,
        #: and a viewer that joined in that turn would get no observer.
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Viewers {self._count} of {self._most}, looking={self.looking}>"

    @property
    def count(self) -> int:
        return self._count

    @property
    def looking(self) -> bool:
        return self._task is not None and not self._task.done()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Counts one viewer. Raises Overloaded at the limit or after `close`."""
        if self._closed or self._count >= self._most:
            raise Overloaded(f"the dashboard has {self._count} viewers or is closed")
        self._count += 1
        if not self.looking:
            self._task = asyncio.create_task(self._observe(), name="dashboard")
        try:
            yield
        finally:
            self._count -= 1
            self._left_at = asyncio.get_running_loop().time()

    async def frames(self) -> AsyncIterator[bytes]:
        """Overviews as JSON: the newest, then each new one. A slow reader misses some."""
        if self._frame is not None:
            yield self._frame
        while not self._closed:
            await self._new_frame.wait()
            if self._frame is not None and not self._closed:
                yield self._frame

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._wake_readers()
        task, self._task = self._task, None
        if task is not None:
            await end_tasks(task)

    def _wake_readers(self) -> None:
        waited, self._new_frame = self._new_frame, asyncio.Event()
        waited.set()

    def _wanted(self) -> bool:
        return self._count > 0 or (
            asyncio.get_running_loop().time() < self._left_at + self._linger_s
        )

    async def _observe(self) -> None:
        """Runs while there are viewers; retries after every error."""
        while self._wanted():
            try:
                async with self._open_observer() as observer:
                    await self._make_frames(observer)
            except DynamoLiteError as exc:
                logger.warning(
                    "the dashboard cannot observe the graph: %s; retry in %g s", exc, self._retry_s
                )
            except Exception:
                logger.exception(
                    "the dashboard cannot observe the graph; retry in %g s", self._retry_s
                )
            self._frame = None
            if self._wanted():
                await asyncio.sleep(self._retry_s)

    async def _make_frames(self, observer: Observer) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._wanted():
            self._frame = msgspec.json.encode(await observer.look())
            self._wake_readers()
            due = max(due + self._period_s, loop.time())
            await asyncio.sleep(due - loop.time())

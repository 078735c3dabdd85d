"""Who looks at the page, and the one observer that looks for all of them.

It is there only while somebody looks, and a little longer, so that a page that is loaded
again has its rates at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from dynamo_lite.overview import Overview
from dynamo_lite.protocol.errors import DynamoLiteError, Overloaded
from dynamo_lite.runtime.tasks import end_tasks

logger = logging.getLogger(__name__)

_MOST = 16
_PERIOD_S = 1.0
_LINGER_S = 10.0
_AGAIN_S = 2.0


class Observing(Protocol):
    async def look(self) -> Overview: ...


class Viewers:
    """`close` ends everybody's frames. most: viewers at a time. period_s: between two looks."""

    def __init__(
        self,
        open_observer: Callable[[], AbstractAsyncContextManager[Observing]],
        *,
        most: int = _MOST,
        period_s: float = _PERIOD_S,
        linger_s: float = _LINGER_S,
    ):
        self._open_observer = open_observer
        self._most, self._period_s, self._linger_s = most, period_s, linger_s
        self._count = 0
        self._left_at = 0.0
        self._frame: bytes | None = None
        self._news = asyncio.Event()
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
        """One viewer. Raises Overloaded when there are enough, or it ends."""
        if self._closed or self._count >= self._most:
            raise Overloaded("too many viewers")
        self._count += 1
        if not self.looking:
            self._task = asyncio.create_task(self._look_on(), name="dashboard")
        try:
            yield
        finally:
            self._count -= 1
            self._left_at = asyncio.get_running_loop().time()

    async def frames(self) -> AsyncIterator[bytes]:
        """Overviews as JSON: the newest one, then each new one. Whoever is slow misses some."""
        if self._frame is not None:
            yield self._frame
        while not self._closed:
            await self._news.wait()
            if self._frame is not None and not self._closed:
                yield self._frame

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._tell()
        task, self._task = self._task, None
        if task is not None:
            await end_tasks(task)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _wanted(self) -> bool:
        return self._count > 0 or (
            asyncio.get_running_loop().time() < self._left_at + self._linger_s
        )

    async def _look_on(self) -> None:
        """Until nobody looks any more; whatever goes wrong is tried again."""
        while self._wanted():
            try:
                async with self._open_observer() as observer:
                    await self._look_with(observer)
            except DynamoLiteError as exc:
                logger.warning("the dashboard sees nothing: %s", exc)
            except Exception:
                logger.exception("the dashboard sees nothing")
            self._frame = None
            if self._wanted():
                await asyncio.sleep(_AGAIN_S)

    async def _look_with(self, observer: Observing) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._wanted():
            self._frame = msgspec.json.encode(await observer.look())
            self._tell()
            due = max(due + self._period_s, loop.time())
            await asyncio.sleep(due - loop.time())

"""From messages to handler tasks: what both messaging implementations share."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable

from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.messaging import Handler

logger = logging.getLogger(__name__)

#: Sends a reply to whoever asked.
Reply = Callable[[bytes], Awaitable[None]]


class Dispatcher:
    """Owns the handler tasks of one subject; at most `limit` run at a time.

    They run in the context in which this was made, not in that of whoever sends.
    """

    def __init__(self, subject: str, handler: Handler, *, limit: int):
        self._subject = subject
        self._handler = handler
        self._context = contextvars.copy_context()
        self._slots = asyncio.Semaphore(limit)
        self._tasks: set[asyncio.Task[None]] = set()
        self._log_limit = LogLimit()

    def __repr__(self) -> str:
        return f"Dispatcher({self._subject!r}, running={len(self._tasks)})"

    @property
    def full(self) -> bool:
        """Whether `submit` would wait."""
        return self._slots.locked()

    async def submit(self, payload: bytes, reply: Reply | None) -> None:
        """Starts the handler on `payload`; waits while `limit` handlers run."""
        await self._slots.acquire()
        task = asyncio.create_task(
            self._run(payload, reply),
            name=f"handle {self._subject}",
            context=self._context.copy(),
        )
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def join(self) -> None:
        """Waits for the running handlers; cancels them if the wait is cancelled."""
        try:
            while self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            raise

    def cancel(self) -> None:
        """Cancels the running handlers; `join` waits for their end."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()

    async def _run(self, payload: bytes, reply: Reply | None) -> None:
        try:
            answer = await self._handler(payload)
            if answer is not None and reply is not None:
                await reply(answer)
        except ProtocolError as exc:
            self._log(logging.WARNING, f"dropped a message: {exc}", None)
        except DynamoLiteError as exc:
            self._log(logging.WARNING, f"{type(exc).__name__}: {exc}", None)
        except Exception as exc:
            self._log(logging.ERROR, "the handler failed", exc)

    def _log(self, level: int, text: str, exc: Exception | None) -> None:
        held_back = self._log_limit.allow()
        if held_back is not None:
            more = f" ({held_back} more since the last such line)" if held_back else ""
            logger.log(level, "%s: %s%s", self._subject, text, more, exc_info=exc)

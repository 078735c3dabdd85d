"""Runs a handler task per message; shared by the messaging implementations."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable

from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.messaging import Handler
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: Sends a reply to the sender of a request.
SendReply = Callable[[bytes], Awaitable[None]]


class Dispatcher:
    """Owns the handler tasks of one subject; at most `limit` run at a time.

    Handlers run in the contextvars context in which the Dispatcher was created, not in the
    sender's.
    """

    def __init__(self, subject: str, handler: Handler, *, limit: int):
        self._subject = subject
        self._handler = handler
        self._context = contextvars.copy_context()
        self._slots = asyncio.Semaphore(limit)
        self._tasks = OwnedTasks(on_end=self._slots.release)
        self._cancelled = False
        self._log_limit = LogLimit()

    def __repr__(self) -> str:
        return f"Dispatcher({self._subject!r}, running={len(self._tasks)})"

    @property
    def full(self) -> bool:
        """Whether `submit` would wait."""
        return self._slots.locked()

    async def submit(self, payload: bytes, reply: SendReply | None) -> None:
        """Starts the handler on `payload`; waits while `limit` handlers run."""
        await self._slots.acquire()
        self._tasks.start(
            self._run(payload, reply),
            name=f"handle {self._subject}",
            context=self._context.copy(),
        )

    async def join(self) -> None:
        """Waits for the running handlers. If the wait is cancelled, so are they."""
        if self._cancelled:
            await self._tasks.end()
        else:
            await self._tasks.join()

    def cancel(self) -> None:
        """Cancels the running handlers; `join` waits for their end."""
        self._cancelled = True
        self._tasks.cancel()

    async def _run(self, payload: bytes, reply: SendReply | None) -> None:
        try:
            answer = await self._handler(payload)
            if answer is not None and reply is not None:
                await reply(answer)
        except ProtocolError as exc:
            self._log(logging.WARNING, f"dropped a message: {exc}", None)
        except DynamoLiteError as exc:
            self._log(logging.WARNING, f"the handler failed: {type(exc).__name__}: {exc}", None)
        except Exception as exc:
            self._log(logging.ERROR, "the handler failed", exc)

    def _log(self, level: int, text: str, exc: Exception | None) -> None:
        held_back = self._log_limit.allow()
        if held_back is not None:
            more = f" ({held_back} similar lines were suppressed)" if held_back else ""
            logger.log(level, "%s: %s%s", self._subject, text, more, exc_info=exc)

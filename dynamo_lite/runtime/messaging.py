"""Messaging: requests and notices on subjects, with bytes as payloads.

`runtime/nats/messaging.py` implements it on NATS. The simulation has others; all pass
`tests/contract/test_messaging.py`. What they share is here, too.
"""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol, Self

from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: Takes a payload; returns the reply, or None for a notice.
Handler = Callable[[bytes], Awaitable[bytes | None]]

#: How many handlers of one subject run at a time.
MAX_HANDLERS = 256

#: Sends a reply to the sender of a request.
SendReply = Callable[[bytes], Awaitable[None]]

#: Takes whether the broker is connected.
OnConnection = Callable[[bool], None]


class Messaging(Protocol):
    @property
    def connected(self) -> bool:
        """Whether the broker is connected and has this process's subscriptions; also true in a
        process that needs no broker.

        Other processes may reconnect a little later than this one, so NoResponders just after
        a reconnect does not mean that a process is dead.
        """
        ...

    def watch_connection(self, callback: OnConnection) -> AbstractContextManager[object]:
        """Calls `callback` after each disconnect and reconnect while the context lasts."""
        ...

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Raises NoResponders, DeadlineExceeded or BrokerUnavailable.

        After the last two the message may have been handled or not. A payload above
        the broker's size limit raises ProtocolError, here and in `publish`.
        """
        ...

    async def publish(self, subject: str, payload: bytes) -> None:
        """Fire and forget. Raises BrokerUnavailable while disconnected."""
        ...

    def serve(self, subject: str, handler: Handler) -> AbstractAsyncContextManager[None]:
        """Serves `subject` while the context lasts; each message is handled in its own task.

        Entering waits up to START_WAIT_S for the broker, then it raises BrokerUnavailable.
        A ProtocolError of a handler is logged and the message is dropped; any other exception
        is logged with its traceback. On exit running handlers are awaited; if the context is
        left by an exception they are cancelled first.
        """
        ...


class Dispatcher:
    """Owns the handler tasks of one subject; at most `MAX_HANDLERS` run at a time.

    An async context manager: leaving it waits for the handlers, or cancels them, as
    `Messaging.serve` says. They run in the contextvars context in which it was created, not in the
    sender's.
    """

    def __init__(self, subject: str, handler: Handler):
        self._subject = subject
        self._handler = handler
        self._context = contextvars.copy_context()
        self._slots = asyncio.Semaphore(MAX_HANDLERS)
        self._tasks = OwnedTasks()
        self._log_limit = LogLimit()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._tasks.join()
        elif kind is GeneratorExit:
            # The event loop closes a context that was never left: nothing can be awaited.
            self._tasks.cancel()
        else:
            await self._tasks.end()

    async def submit(self, payload: bytes, reply: SendReply | None) -> None:
        """Starts the handler on `payload`; waits while as many run as may."""
        await self._slots.acquire()
        name, context = f"handle {self._subject}", self._context.copy()
        task = self._tasks.start(self._run(payload, reply), name=name, context=context)
        task.add_done_callback(lambda _: self._slots.release())

    async def _run(self, payload: bytes, reply: SendReply | None) -> None:
        try:
            answer = await self._handler(payload)
            if answer is not None and reply is not None:
                await reply(answer)
        except DynamoLiteError as exc:
            said = "dropped a message" if isinstance(exc, ProtocolError) else "the handler failed"
            self._log_limit.log(logger, "%s: %s: %s", self._subject, said, exc)
        except Exception:
            said = "%s: the handler failed"
            self._log_limit.log(logger, said, self._subject, exc_info=True)

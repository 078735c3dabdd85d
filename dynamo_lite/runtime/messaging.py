"""Request and notice messaging: one subject, bytes in, bytes out.

`nats.py` is the real one; `memory.py` has the in-process twin. Both pass
`tests/contract/test_messaging.py`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from dynamo_lite.runtime.listeners import Listeners

#: Takes a payload; returns the reply, or None where the sender wants none.
Handler = Callable[[bytes], Awaitable[bytes | None]]

#: Takes whether the broker is connected now.
OnConnection = Callable[[bool], None]


class Messaging(Protocol):
    @property
    def connected(self) -> bool: ...

    def watch_connection(self, callback: OnConnection) -> AbstractContextManager[None]:
        """Calls back after each loss and each reconnect while the context lasts."""
        ...

    async def wait_connected(self, timeout_s: float) -> None:
        """Returns when the broker is connected. Raises BrokerUnavailable after `timeout_s`.

        Others may find their way back a little later: nobody responding says little
        just after a reconnect.
        """
        ...

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Raises NoResponders, DeadlineExceeded or BrokerUnavailable.

        After the last two the message may have been handled or not. A payload above
        the broker's limit raises ProtocolError, here and in `publish`.
        """
        ...

    async def publish(self, subject: str, payload: bytes) -> None:
        """Fire and forget. Raises BrokerUnavailable while disconnected."""
        ...

    def serve(self, subject: str, handler: Handler) -> AbstractAsyncContextManager[None]:
        """Serves `subject` while the context lasts; each message in a task of its own.

        Entering waits for the broker, START_WAIT_S at most; then it raises BrokerUnavailable.
        A handler that raises ProtocolError is logged and the message dropped;
        any other exception is logged with its traceback. On exit running
        handlers are awaited; when the exit is an exception they are cancelled first.
        """
        ...


class ConnectionWatch:
    """Who wants to know when the connection comes and goes; part of each implementation."""

    def __init__(self) -> None:
        self._listeners = Listeners[[bool]]("the connection")

    def watch(self, callback: OnConnection) -> AbstractContextManager[None]:
        return self._listeners.add(callback)

    async def wait(self, connected: Callable[[], bool], timeout_s: float) -> None:
        """Returns when `connected` is true, or after the time."""
        changed = asyncio.Event()
        with self.watch(lambda _: changed.set()), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not connected():
                    await changed.wait()
                    changed.clear()

    def tell(self, connected: bool) -> None:
        self._listeners.notify(connected)

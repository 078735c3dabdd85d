"""Messaging: requests and notices on subjects, with bytes as payloads.

`runtime/nats/messaging.py` implements it on NATS. The simulation has others; all pass
`tests/contract/test_messaging.py`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from dynamo_lite.runtime.listeners import Listeners

#: Takes a payload; returns the reply, or None for a notice.
Handler = Callable[[bytes], Awaitable[bytes | None]]

#: Takes whether the broker is connected.
OnConnection = Callable[[bool], None]


class Messaging(Protocol):
    @property
    def connected(self) -> bool: ...

    def watch_connection(self, callback: OnConnection) -> AbstractContextManager[None]:
        """Calls `callback` after each disconnect and reconnect while the context lasts."""
        ...

    async def wait_connected(self, timeout_s: float) -> None:
        """Returns when the broker is connected and has this process's subscriptions again. Raises
        BrokerUnavailable after `timeout_s`.

        Other processes may reconnect a little later than this one, so NoResponders just after
        a reconnect does not mean that a process is dead.
        """
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


class ConnectionWatch:
    """The listeners of a connection's state; part of each implementation."""

    def __init__(self) -> None:
        self._listeners = Listeners[[bool]]("the connection")

    def watch(self, callback: OnConnection) -> AbstractContextManager[None]:
        return self._listeners.add(callback)

    async def wait(self, connected: Callable[[], bool], timeout_s: float) -> None:
        """Returns when `connected()` is true, or after the timeout."""
        changed = asyncio.Event()
        with self.watch(lambda _: changed.set()), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not connected():
                    await changed.wait()
                    changed.clear()

    def tell(self, connected: bool) -> None:
        self._listeners.notify(connected)

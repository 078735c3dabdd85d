"""Request and notice messaging: one subject, bytes in, bytes out.

`nats.py` is the real one; `memory.py` has the in-process twin. Both pass
`tests/contract/test_messaging.py`.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

#: Takes a payload; returns the reply, or None where the sender wants none.
Handler = Callable[[bytes], Awaitable[bytes | None]]


class Messaging(Protocol):
    @property
    def connected(self) -> bool: ...

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

        A handler that raises ProtocolError is logged and the message dropped;
        any other exception is logged with its traceback. On exit running
        handlers are awaited; when the exit is an exception they are cancelled first.
        """
        ...

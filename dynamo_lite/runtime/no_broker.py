"""The messaging of a process that needs no broker."""

import contextlib
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Self

from dynamo_lite.protocol.errors import BrokerUnavailable
from dynamo_lite.runtime.messaging import Handler, OnConnection

_WHY = "this process has no broker"


class NoBroker:
    """Implements `Messaging`. `connected` is true, because no connection is missing. Every call
    that would need a broker raises BrokerUnavailable."""

    connected = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    def watch_connection(self, callback: OnConnection) -> AbstractContextManager[None]:
        """There is never a change."""
        return contextlib.nullcontext()

    async def wait_connected(self, timeout_s: float) -> None:
        """Returns at once."""

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        raise BrokerUnavailable(_WHY)

    async def publish(self, subject: str, payload: bytes) -> None:
        raise BrokerUnavailable(_WHY)

    def serve(self, subject: str, handler: Handler) -> AbstractAsyncContextManager[None]:
        raise BrokerUnavailable(_WHY)

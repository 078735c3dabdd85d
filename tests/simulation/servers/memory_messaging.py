"""Messaging's in-process twin: same contract as NATS, with an outage on demand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Self

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
)
from dynamo_lite.runtime.messaging import ConnectionWatch, Dispatcher, Handler, OnConnection
from dynamo_lite.runtime.retry import START_WAIT_S


class MemoryMessaging:
    """Implements `Messaging` for the tasks of one event loop, which share one instance.

    As with NATS every server of a subject gets every message, and the first
    answer to a request wins.
    """

    def __init__(self) -> None:
        self._connected = True
        self._watch = ConnectionWatch()
        self._served: dict[str, list[Dispatcher]] = {}

    def __repr__(self) -> str:
        return f"MemoryMessaging(subjects={len(self._served)}, connected={self._connected})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @property
    def connected(self) -> bool:
        return self._connected

    def set_connected(self, connected: bool) -> None:
        """False: calls raise BrokerUnavailable and replies are lost."""
        changed, self._connected = connected != self._connected, connected
        if changed:
            self._watch.tell(connected)

    def watch_connection(self, callback: OnConnection) -> AbstractContextManager[None]:
        return self._watch.watch(callback)

    async def wait_connected(self, timeout_s: float) -> None:
        await self._watch.wait(lambda: self.connected, timeout_s)
        self._check_connected()

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        self._check(subject, payload)
        servers = list(self._served.get(subject, ()))
        if not servers:
            raise NoResponders(f"no process serves {subject}")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def reply(data: bytes) -> None:
            if self._connected and not answer.done():
                answer.set_result(data)

        try:
            async with asyncio.timeout(timeout_s):
                for server in servers:
                    await server.submit(payload, reply)
                return await answer
        except TimeoutError as exc:
            raise DeadlineExceeded(f"request to {subject}", timeout_s) from exc

    async def publish(self, subject: str, payload: bytes) -> None:
        self._check(subject, payload)
        for server in list(self._served.get(subject, ())):
            await server.submit(payload, None)

    @contextlib.asynccontextmanager
    async def serve(self, subject: str, handler: Handler) -> AsyncIterator[None]:
        await self.wait_connected(START_WAIT_S)
        dispatcher = Dispatcher(subject, handler)
        self._served.setdefault(subject, []).append(dispatcher)
        try:
            yield
        except BaseException:
            dispatcher.cancel()
            raise
        finally:
            self._served[subject].remove(dispatcher)
            if not self._served[subject]:
                del self._served[subject]
            await dispatcher.join()

    def _check_connected(self) -> None:
        if not self._connected:
            raise BrokerUnavailable("the memory broker is switched off")

    def _check(self, subject: str, payload: bytes) -> None:
        self._check_connected()
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"the message to {subject} exceeds the broker's limit")

"""Messaging of one simulated process, through the simulated NATS server."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any, Self

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
    StartupError,
)
from dynamo_lite.runtime.dispatch import Dispatcher
from dynamo_lite.runtime.messaging import ConnectionWatch, Handler, OnConnection
from dynamo_lite.runtime.retry import retry_while_unavailable
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.link import LinkDown, ServerLink
from dynamo_lite.simulation.servers.nats import PORT
from dynamo_lite.simulation.servers.server import at_once

logger = logging.getLogger(__name__)

#: A ping each second; the connection is given up when the third goes unanswered.
SILENCE_S = (2.0, 3.5)
_CLOSE_TIMEOUT_S = 2.0

_Reply = tuple[str, int]


class SimMessaging:
    """Implements `Messaging` for the process in which it is made.

    As with NATS a message may get lost whenever a connection breaks, and an answer
    finds its way also over the next connection.
    """

    def __init__(
        self,
        network: Network,
        *,
        port: int = PORT,
        connect_timeout_s: float = 10.0,
        max_handlers: int = 256,
    ):
        process = network.loop.current_process()
        self._loop = network.loop
        self._connect_timeout_s = connect_timeout_s
        self._max_handlers = max_handlers
        self._inbox = f"_INBOX.{process}.{network.next_number()}"
        self._watch = ConnectionWatch()
        self._subscriptions: dict[int, _Subscription] = {}
        self._numbers = 0
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._link = ServerLink(
            network,
            process,
            port,
            silence_s=SILENCE_S,
            on_push=self._take,
            on_state=self._on_state,
        )

    def __repr__(self) -> str:
        return f"SimMessaging({self._link!r}, subjects={len(self._subscriptions)})"

    async def __aenter__(self) -> Self:
        try:
            await self._link.open(self._connect_timeout_s)
        except BaseException as exc:
            self._link.close()
            if isinstance(exc, TimeoutError):
                raise StartupError("cannot use NATS: no answer in time") from exc
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._link.close()

    @property
    def connected(self) -> bool:
        return self._link.up

    def watch_connection(self, callback: OnConnection) -> AbstractContextManager[None]:
        return self._watch.watch(callback)

    async def wait_connected(self, timeout_s: float) -> None:
        await self._watch.wait(lambda: self.connected, timeout_s)
        if not self.connected:
            raise BrokerUnavailable("NATS: disconnected")

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        self._numbers += 1
        number = self._numbers
        self._publish(subject, payload, (self._inbox, number))
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._asked[number] = answer
        timer = self._loop.call_later(timeout_s, _give_up, answer, subject, timeout_s)
        try:
            return await answer
        finally:
            timer.cancel()
            del self._asked[number]

    async def publish(self, subject: str, payload: bytes) -> None:
        self._publish(subject, payload, None)

    async def _subscribe(self, number: int, subscription: "_Subscription") -> None:
        self._subscriptions[number] = subscription
        try:
            self._send(("subscribe", number, subscription.subject))
            await self._flush(subscription.subject)
        except BaseException as exc:
            del self._subscriptions[number]
            if isinstance(exc, DeadlineExceeded):
                raise BrokerUnavailable(f"NATS: {exc}") from exc
            raise

    @contextlib.asynccontextmanager
    async def serve(self, subject: str, handler: Handler) -> AsyncIterator[None]:
        dispatcher = Dispatcher(subject, handler, limit=self._max_handlers)
        self._numbers += 1
        number = self._numbers
        subscription = _Subscription(self, subject, dispatcher)
        await retry_while_unavailable(lambda: self._subscribe(number, subscription))
        try:
            yield
        except BaseException:
            dispatcher.cancel()
            raise
        finally:
            try:
                # What the server sent before it heard of this is still handled.
                self._send(("unsubscribe", number, subject))
                await self._flush(subject)
            except (BrokerUnavailable, DeadlineExceeded) as exc:
                logger.debug("%s: unsubscribed without a flush: %r", subject, exc)
            finally:
                del self._subscriptions[number]
            await subscription.emptied()
            await dispatcher.join()

    async def reply(self, reply: _Reply, payload: bytes) -> None:
        """Answers a request. Raises BrokerUnavailable."""
        _check_size("a reply", payload)
        self._send(("reply", reply, payload), loosely=True)

    def _publish(self, subject: str, payload: bytes, reply: _Reply | None) -> None:
        _check_size(subject, payload)
        self._send(("publish", subject, payload, reply), loosely=True)

    def _send(self, item: Any, *, loosely: bool = False) -> None:
        try:
            self._link.send(item, loosely=loosely)
        except LinkDown as exc:
            raise BrokerUnavailable("NATS: disconnected") from exc

    async def _flush(self, subject: str) -> None:
        try:
            await self._link.call("flush", timeout_s=_CLOSE_TIMEOUT_S)
        except LinkDown as exc:
            raise BrokerUnavailable("NATS: disconnected") from exc
        except TimeoutError as exc:
            raise DeadlineExceeded(f"request to {subject}", _CLOSE_TIMEOUT_S) from exc

    def _on_state(self, up: bool) -> None:
        if up:
            self._link.send(("inbox", self._inbox))
            for number, subscription in self._subscriptions.items():
                self._link.send(("subscribe", number, subscription.subject))
        logger.info("NATS: %s", "connected" if up else "disconnected; reconnecting")
        self._watch.tell(up)

    def _take(self, item: Any) -> None:
        match item:
            case ("message", number, payload, reply):
                subscription = self._subscriptions.get(number)
                if subscription is not None:
                    subscription.take(payload, reply)
            case ("reply", number, payload):
                answer = self._asked.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(payload)
            case ("no responders", number):
                answer = self._asked.get(number)
                if answer is not None and not answer.done():
                    answer.set_exception(NoResponders("nobody serves the subject"))


class _Subscription:
    """Hands messages to the dispatcher, in order; those wait that it cannot take yet."""

    def __init__(self, messaging: SimMessaging, subject: str, dispatcher: Dispatcher):
        self.subject = subject
        self._messaging = messaging
        self._dispatcher = dispatcher
        self._waiting: deque[tuple[bytes, _Reply | None]] = deque()
        self._pump: asyncio.Task[None] | None = None

    def take(self, payload: bytes, reply: _Reply | None) -> None:
        if self._waiting or self._dispatcher.full:
            self._waiting.append((payload, reply))
            if self._pump is None:
                self._pump = asyncio.create_task(self._hand_on(), name=f"pump {self.subject}")
        else:
            at_once(self._submit(payload, reply))

    async def emptied(self) -> None:
        """Returns when everything that came was handed on."""
        if self._pump is not None:
            try:
                await self._pump
            except asyncio.CancelledError:
                self._pump.cancel()
                raise

    async def _submit(self, payload: bytes, reply: _Reply | None) -> None:
        async def answer(data: bytes) -> None:
            assert reply is not None
            await self._messaging.reply(reply, data)

        await self._dispatcher.submit(payload, answer if reply else None)

    async def _hand_on(self) -> None:
        try:
            while self._waiting:
                await self._submit(*self._waiting[0])
                self._waiting.popleft()
        finally:
            self._pump = None


def _check_size(subject: str, payload: bytes) -> None:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"the message to {subject} exceeds the broker's limit")


def _give_up(answer: asyncio.Future[bytes], subject: str, timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(DeadlineExceeded(f"request to {subject}", timeout_s))

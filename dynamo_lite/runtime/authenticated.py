"""Messaging whose messages are authenticated with the graph's secret.

A message is a tag, a nonce of 16 random bytes, and the payload. The tag covers subject, nonce and
payload, so no two messages have the same one. The tag of a reply covers the tag of its request:
a reply that was recorded earlier, also one to an identical request, is not authentic.
"""

import logging
import secrets
from contextlib import AbstractAsyncContextManager, AbstractContextManager

from dynamo_lite.protocol.errors import BrokerUnavailable, ProtocolError
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.messaging import Handler, Messaging, OnConnection
from dynamo_lite.runtime.secret import TAG_BYTES, GraphSecret

logger = logging.getLogger(__name__)

_NONCE_BYTES = 16


class AuthenticatedMessaging:
    """Implements Messaging on another one.

    A request is bound to its subject, and a reply to this one request. A message that is not
    authentic is dropped and counted as `unauthentic`. For a reply that is not authentic,
    BrokerUnavailable is raised.
    """

    def __init__(self, messaging: Messaging, secret: GraphSecret, on_drop: OnDrop = uncounted):
        self._messaging, self._secret, self._on_drop = messaging, secret, on_drop
        self._log_limit = LogLimit()

    @property
    def connected(self) -> bool:
        return self._messaging.connected

    def watch_connection(self, callback: OnConnection) -> AbstractContextManager[None]:
        return self._messaging.watch_connection(callback)

    async def wait_connected(self, timeout_s: float) -> None:
        await self._messaging.wait_connected(timeout_s)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        asked = self._protect(subject, payload)
        reply = await self._messaging.request(subject, asked, timeout_s=timeout_s)
        try:
            return self._secret.open(_reply(subject, asked), reply)
        except ProtocolError as exc:
            self._on_drop("unauthentic")
            raise BrokerUnavailable(f"the reply on {subject} is {exc}") from exc

    async def publish(self, subject: str, payload: bytes) -> None:
        await self._messaging.publish(subject, self._protect(subject, payload))

    def serve(self, subject: str, handler: Handler) -> AbstractAsyncContextManager[None]:
        async def handle(asked: bytes) -> bytes | None:
            try:
                payload = self._secret.open(_message(subject), asked)[_NONCE_BYTES:]
            except ProtocolError as exc:
                self._on_drop("unauthentic")
                if (more := self._log_limit.allow()) is not None:
                    logger.warning(
                        "dropped a message on %s (and %d before it): %s", subject, more, exc
                    )
                return None
            reply = await handler(payload)
            return None if reply is None else self._secret.protect(_reply(subject, asked), reply)

        return self._messaging.serve(subject, handle)

    def _protect(self, subject: str, payload: bytes) -> bytes:
        return self._secret.protect(_message(subject), secrets.token_bytes(_NONCE_BYTES) + payload)


def _message(subject: str) -> bytes:
    return b"nonce and message " + subject.encode()


def _reply(subject: str, asked: bytes) -> bytes:
    return b"reply " + asked[:TAG_BYTES] + subject.encode()

"""Messaging on NATS: connection options, and the mapping of the client's errors."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Self

from nats import errors
from nats.aio.client import DEFAULT_INBOX_PREFIX, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
    StartupError,
)
from dynamo_lite.runtime.address import ServerAddress, host_port, parse_nats_url, redact
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listeners import Listeners
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.messaging import Dispatcher, Handler, OnConnection
from dynamo_lite.runtime.nats.client import (
    PersistentClient,
    TlsClient,
    TlsMismatch,
    drop,
    is_forbidden,
)
from dynamo_lite.runtime.retry import retry_while_unavailable
from dynamo_lite.runtime.tasks import first_of
from dynamo_lite.runtime.tls import tls_refusal

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
_AUTHORIZATION = "authorization violation"


class NatsMessaging:
    """Implements `Messaging`; `client` is the underlying nats-py connection.

    url: see `parse_nats_url`; empty for a process that needs no broker, where every call that would
    need one raises BrokerUnavailable.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 10.0,
        on_drop: OnDrop = uncounted,
    ):
        """Raises ConfigError when `url` is not a NATS URL."""
        self._on_drop = on_drop
        self._url = redact(url)
        self._address = parse_nats_url(url) if url else None
        self._connect_timeout_s = connect_timeout_s
        self._client: Client | None = None
        self._outage = False
        self._listeners = Listeners[[bool]]("the connection")
        self._refusals: asyncio.Queue[str] = asyncio.Queue()
        self._log_limit = LogLimit()

    @property
    def client(self) -> Client:
        """Raises BrokerUnavailable outside of the context."""
        if self._client is None:
            raise BrokerUnavailable(f"NATS at {self._url}: not connected")
        return self._client

    @property
    def connected(self) -> bool:
        # nats-py counts as connected before it has sent the subscriptions again.
        client = self._client
        if client is None:
            return self._address is None
        return client.is_connected and not self._outage

    @property
    def clustered(self) -> bool:
        """Whether the server is one of a cluster. Raises BrokerUnavailable, as `client`."""
        return bool(self.client._server_info.get("cluster"))  # pyright: ignore[reportPrivateUsage]

    @property
    def asks_who(self) -> bool:
        """Whether the server has users. Raises BrokerUnavailable, as `client`."""
        return bool(self.client._server_info.get("auth_required"))  # pyright: ignore[reportPrivateUsage]

    def watch_connection(self, callback: OnConnection) -> AbstractContextManager[object]:
        return self._listeners.add(callback)

    async def __aenter__(self) -> Self:
        """Raises StartupError on a timeout, or when all servers refuse the connection."""
        if (address := self._address) is None:
            return self
        client = TlsClient(address.tls) if address.tls else PersistentClient()
        try:
            # With endless reconnects the first connect never gives up either.
            async with asyncio.timeout(self._connect_timeout_s):
                await first_of(self._open(client, address), self._all_refuse(len(address.hosts)))
        except (errors.Error, OSError, TimeoutError, ValueError) as exc:
            await _close(client)
            reason = _reason(client.last_error or exc) or "timeout, no server has answered"
            raise StartupError(f"cannot use NATS at {self._url}: {redact(reason)}") from exc
        except BaseException:
            await _close(client)
            raise
        self._client = client
        return self

    async def __aexit__(self, *_: object) -> None:
        client, self._client = self._client, None
        if client is not None:
            await _close(client)

    async def refusal(self, subjects: Iterable[str]) -> str:
        """The server's reason if this user may not receive on its own inbox, or on one of these
        subjects; "" if it may. Raises BrokerUnavailable, DeadlineExceeded."""
        tried: list[Subscription] = []
        try:
            with self._errors("the subscriptions", _CLOSE_TIMEOUT_S):
                for subject in (self.client.new_inbox(), *subjects):
                    tried.append(await self.client.subscribe(subject))
                await self.client.flush(timeout=_CLOSE_TIMEOUT_S)  # pyright: ignore[reportArgumentType]
        finally:
            for subscription in tried:
                drop(subscription)
        error = self.client.last_error
        return redact(str(error)) if error is not None and is_forbidden(error) else ""

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        with self._errors(subject, timeout_s):
            self._check_connected()
            reply = await self.client.request(subject, payload, timeout=timeout_s)
        return reply.data

    async def publish(self, subject: str, payload: bytes) -> None:
        with self._errors(subject, 0.0):
            self._check_connected()
            await self.client.publish(subject, payload)

    @contextlib.asynccontextmanager
    async def serve(self, subject: str, handler: Handler) -> AsyncIterator[None]:
        """See `Messaging.serve`. Entering returns when the server has the subscription."""
        async with Dispatcher(subject, handler) as dispatcher:

            async def deliver(message: Msg) -> None:
                # By a reply to any other subject a user could send there with our rights.
                inbox = message.reply.startswith(DEFAULT_INBOX_PREFIX.decode())
                reply = partial(self.publish, message.reply) if inbox else None
                await dispatcher.submit(message.data, reply)

            subscription = await retry_while_unavailable(lambda: self._subscribe(subject, deliver))
            try:
                yield
                await _drain(subscription)
            finally:
                drop(subscription)

    async def _subscribe(
        self, subject: str, deliver: Callable[[Msg], Awaitable[None]]
    ) -> Subscription:
        with self._errors(subject, _CLOSE_TIMEOUT_S):
            self._check_connected()
            subscription = await self.client.subscribe(subject, cb=deliver)
            try:
                await self.client.flush(timeout=_CLOSE_TIMEOUT_S)  # pyright: ignore[reportArgumentType]
            except BaseException as exc:
                drop(subscription)
                if isinstance(exc, errors.TimeoutError):
                    raise BrokerUnavailable(
                        f"NATS at {self._url}: timeout of the subscription"
                    ) from exc
                raise
        return subscription

    async def _all_refuse(self, servers: int) -> None:
        """Raises the last server's reason when all servers have refused."""
        refusal = ""
        for _ in range(servers):
            refusal = await self._refusals.get()
        raise errors.Error(refusal)

    async def _open(self, client: Client, address: ServerAddress) -> None:
        await client.connect(
            _server_urls(address),
            tls=address.tls.context() if address.tls else None,
            user=address.user,
            password=address.password,
            token=address.token,
            user_credentials=str(address.creds) if address.creds else None,
            nkeys_seed=str(address.nkey) if address.nkey else None,
            inbox_prefix=address.inbox or DEFAULT_INBOX_PREFIX,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            reconnect_time_wait=0.1,  # pyright: ignore[reportArgumentType]
            max_reconnect_attempts=-1,
            ping_interval=1,
            max_outstanding_pings=2,
            # While disconnected every publish raises; nothing is buffered for later.
            pending_size=0,
        )

    def _check_connected(self) -> None:
        # Otherwise nats-py registers a reply future, and never removes it.
        if not self.client.is_connected:
            raise BrokerUnavailable(f"NATS at {self._url}: disconnected")

    @contextlib.contextmanager
    def _errors(self, subject: str, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except errors.NoRespondersError as exc:
            raise NoResponders(f"no process serves {subject}") from exc
        except errors.MaxPayloadError as exc:
            raise ProtocolError(f"the message to {subject} exceeds the broker's limit") from exc
        except errors.TimeoutError as exc:
            raise DeadlineExceeded(f"request to {subject}", timeout_s) from exc
        except (errors.Error, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            raise BrokerUnavailable(f"NATS at {self._url}: {reason}") from exc

    async def _on_error(self, exc: Exception) -> None:
        if self._client is None:
            if _is_refusal(exc):
                self._refusals.put_nowait(_reason(exc))
            return
        if isinstance(exc, ProtocolError):
            self._on_drop("nats")
        elif is_forbidden(exc) or _is_refusal(exc):
            self._on_drop("nats_refused")
        # While the server is unavailable every reconnect attempt ends here.
        if self._outage and not _is_refusal(exc):
            return
        why = redact(_reason(exc)) or repr(exc)
        self._log_limit.log(logger, "NATS at %s: %s", self._url, why)

    async def _on_disconnected(self) -> None:
        if self._client is None:
            return
        if not self._outage:
            self._outage = True
            logger.warning("NATS at %s: disconnected; reconnecting", self._url)
        # Again for a connection that is lost before it was reported: listeners may use it already.
        self._listeners.notify(False)

    async def _on_reconnected(self) -> None:
        self._outage = False
        logger.info("NATS at %s: reconnected", self._url)
        self._listeners.notify(True)


async def _drain(subscription: Subscription) -> None:
    """Messages that the server sends before it knows are still handled."""
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await subscription.drain()
    except (errors.Error, OSError, TimeoutError) as exc:
        logger.debug("%s: unsubscribed without a flush: %r", subscription.subject, exc)


def _server_urls(address: ServerAddress) -> list[str]:
    """Without credentials, which are also used for servers that the cluster announces later."""
    scheme = "tls" if address.tls else "nats"
    return [f"{scheme}://{host_port(*host)}" for host in address.hosts]


def _is_refusal(exc: Exception) -> bool:
    """Whether a retry is of no use."""
    text = str(exc)
    known = isinstance(exc, TlsMismatch) or _AUTHORIZATION in text.lower()
    return known or tls_refusal(text) is not None


def _reason(exc: BaseException) -> str:
    text = str(exc)
    if _AUTHORIZATION in text.lower():
        return "it refuses the user name, password, token or key"
    return tls_refusal(text) or text


async def _close(client: Client) -> None:
    """Closes the connection in any state, within `_CLOSE_TIMEOUT_S`."""
    with contextlib.suppress(errors.Error, OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await client.close()

"""The connection to etcd: channels to its members, TLS, and the authentication token.

Every member has its own channel, so that each certificate is checked against its own host name.
Calls go to one member until it is unavailable. Tokens become invalid when a member restarts or
when they expire, and are renewed when etcd reports that. Messages and stubs are aetcd's; its calls
are not used, because they hide the store's revision.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from aetcd import rpc

from dynamo_lite.runtime.address import ServerAddress, host_port
from dynamo_lite.runtime.tls import Reread

#: Longest wait for one member's answer to one call.
CALL_TIMEOUT_S = 2.0
#: Codes of a member that is unreachable, hangs, or has no leader.
UNREACHABLE = (rpc.StatusCode.UNAVAILABLE, rpc.StatusCode.DEADLINE_EXCEEDED)
#: The token is unknown or expired, the users have changed since, or no token was sent.
_STALE_TOKEN = (
    "invalid auth token",
    "revision of auth store is old",
    "revision in header is old",  # they have changed after etcd's first look at the request
    "user name is empty",
)
_AUTH_IS_OFF = "authentication is not enabled"
_NEVER_SENT = "failed to connect to all addresses"


#: gRPC's defaults need 5 s to reconnect after an outage, and never detect a server that hangs:
#: without the ping timeout the keepalive does not fire.
_CHANNEL_OPTIONS = {
    "grpc.initial_reconnect_backoff_ms": 100,
    # In spite of its name, this is the timeout of one try. A server that hangs accepts
    # connections, and continues the handshake when it resumes.
    "grpc.min_reconnect_backoff_ms": 1000,
    "grpc.max_reconnect_backoff_ms": 400,
    "grpc.keepalive_time_ms": 5000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
    # Snapshots of a large prefix exceed the default of 4 MiB.
    "grpc.max_receive_message_length": 64 << 20,
    # Two stores of one process share neither a connection nor its backoff.
    "grpc.use_local_subchannel_pool": 1,
}


def open_channel(host: tuple[str, int], address: ServerAddress) -> Any:
    """The `grpc.aio.Channel` to one of `address.hosts`; it connects when it is first used.

    Raises ConfigError when a file of `address.tls` cannot be read.
    """
    target, options = host_port(*host), list(_CHANNEL_OPTIONS.items())
    if address.tls is None:
        return rpc.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(*address.tls.read())
    return rpc.secure_channel(target, credentials, options=options)


#: See `open_channel`.
OpenChannel = Callable[[tuple[str, int], ServerAddress], Any]


class EtcdClient:
    """Requests of etcd's API to one of several members; created and used in one event loop.

    `channel` and `metadata`, which a watch needs, change when another member is used.
    """

    def __init__(self, address: ServerAddress, open_channel: OpenChannel):
        """Raises ConfigError when a file of `address.tls` cannot be read."""
        self.timeout_s = CALL_TIMEOUT_S
        #: With the token; None: the user is to be authenticated.
        self.metadata: tuple[tuple[str, str], ...] | None = () if address.user is None else None
        self._authenticating = asyncio.Lock()
        self._address, self._open_channel = address, open_channel
        self._opened = Reread(address.tls, self._open)
        self._channels = self._opened.current()
        #: Those with certificates that were renewed since.
        self._replaced: list[Any] = []
        self._use(self._channels[0])

    async def close(self) -> None:
        for channel in (*self._replaced, *self._channels):
            await channel.close()

    async def call(self, request: Any, within_s: float = math.inf) -> Any:
        """The reply to one of the requests in `_use`; None if etcd has ended a refresh without one.
        within_s: a shorter limit for each member.

        Retries with another member, or with a new token, if etcd has certainly not applied the
        request, or if it only reads. In any case it stops using a member that fails. Raises
        AioRpcError.
        """
        reads = isinstance(request, rpc.RangeRequest)
        timeout_s = min(self.timeout_s, within_s)
        untried = len(self._channels)
        renewed = False
        while True:
            channel, metadata, sent = self.channel, self.metadata, False
            try:
                metadata = await self._authenticated(timeout_s)
                channel, sent = self.channel, True
                send = self._methods[type(request)]
                return await send(request, timeout=timeout_s, metadata=metadata)
            except rpc.AioRpcError as exc:
                if exc.code() in UNREACHABLE:
                    untried -= 1
                    self._leave(channel)
                    if not untried or (sent and not reads and _NEVER_SENT not in details(exc)):
                        raise
                elif self._address.user is not None and not renewed and _is_stale(exc):
                    renewed = True
                    if self.metadata is metadata:  # otherwise another call has renewed it
                        self.metadata = None
                else:
                    raise

    def _use(self, channel: Any) -> None:
        self.channel = channel
        keys, leases = rpc.KVStub(channel), rpc.LeaseStub(channel)
        self._methods: dict[Any, Callable[..., Awaitable[Any]]] = {
            rpc.RangeRequest: keys.Range,
            rpc.PutRequest: keys.Put,
            rpc.DeleteRangeRequest: keys.DeleteRange,
            rpc.TxnRequest: keys.Txn,
            rpc.LeaseGrantRequest: leases.LeaseGrant,
            rpc.LeaseKeepAliveRequest: partial(_only_reply, leases.LeaseKeepAlive),
            rpc.LeaseRevokeRequest: leases.LeaseRevoke,
        }

    def _leave(self, channel: Any) -> None:
        """Switches to the member after that of `channel`, unless another call did so. Files that
        have changed are read again."""
        if channel is not self.channel:
            return
        following = self._channels.index(channel) + 1
        if (opened := self._opened.current()) is not self._channels:
            self._replaced += self._channels
            self._channels = opened
        self._use(self._channels[following % len(self._channels)])

    def _open(self) -> list[Any]:
        """A channel to each member. Raises ConfigError."""
        address = self._address
        if address.tls is not None:
            address.tls.context()  # a pair that does not match would end all connections
        return [self._open_channel(host, address) for host in address.hosts]

    async def _authenticated(self, timeout_s: float) -> tuple[tuple[str, str], ...]:
        """`metadata`, with a token if there is a user. Raises AioRpcError."""
        try:
            # With the wait for another caller that authenticates.
            async with asyncio.timeout(timeout_s), self._authenticating:
                if self.metadata is None:
                    user, password = self._address.user, self._address.password
                    request = rpc.AuthenticateRequest(name=user, password=password)
                    send = rpc.AuthStub(self.channel).Authenticate
                    reply = await send(request, timeout=timeout_s)
                    self.metadata = (("token", reply.token),)
                return self.metadata
        except rpc.AioRpcError as exc:
            # As in etcd's own clients: credentials are ignored by a server without users.
            if _AUTH_IS_OFF not in details(exc):
                raise
            self.metadata = ()
            return self.metadata
        except TimeoutError as exc:
            late, none = rpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata()
            raise rpc.AioRpcError(late, none, none, "no token in time") from exc


async def _only_reply(stream: Any, request: Any, **options: Any) -> Any:
    """The reply of a stream to its one request."""
    async for reply in stream([request], **options):
        return reply


def details(exc: BaseException) -> str:
    """The error text of etcd or gRPC."""
    text = exc.details() if isinstance(exc, rpc.AioRpcError) else str(exc)
    return text or type(exc).__name__


def is_future_revision(exc: BaseException) -> bool:
    """Whether etcd reports that the requested revision does not exist yet."""
    return "future revision" in details(exc)


def _is_stale(exc: BaseException) -> bool:
    return any(sign in details(exc) for sign in _STALE_TOKEN)

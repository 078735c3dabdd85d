"""The connection to etcd: channels to its members, TLS, and the authentication token.

aetcd's client has a single plain channel. Here every member has its own channel, so that
each certificate is checked against its own host name. Calls go to one member until it is
unavailable. Tokens become invalid when a member restarts or when they expire, and are renewed
when etcd reports that.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aetcd
from aetcd import rpc

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.address import ServerAddress
from dynamo_lite.runtime.etcd.backend import EtcdBackend
from dynamo_lite.runtime.log_limit import LogLimit

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest wait for one member's answer to one call.
CALL_TIMEOUT_S = 2.0
#: Codes of a member that is unreachable, hangs, or has no leader.
UNREACHABLE = (rpc.StatusCode.UNAVAILABLE, rpc.StatusCode.DEADLINE_EXCEEDED)
#: The token is unknown or expired, the users have changed since, or no token was sent.
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")
_NEVER_SENT = "failed to connect to all addresses"
_AUTH_IS_OFF = "authentication is not enabled"


class EtcdClient(aetcd.Client):
    """aetcd's calls on one of several members; created and used in one event loop.

    Every use of `channel`, a stub or `metadata` must be inside `call`, because they change.
    """

    # aetcd does not type these, or too narrowly.
    channel: Any
    metadata: Any

    def __init__(self, address: ServerAddress, backend: EtcdBackend):
        """Raises ConfigError when a file of `address.tls` cannot be read."""
        self.timeout_s = CALL_TIMEOUT_S
        super().__init__(timeout=self.timeout_s)  # pyright: ignore[reportArgumentType]
        self._user, self._secret = address.user, address.password
        self._authenticating = asyncio.Lock()
        self._address, self._backend = address, backend
        self._files, self._log_limit = _files(address), LogLimit(60.0)
        self._channels = [backend.open_channel(host, address) for host in address.hosts]
        #: Those with certificates that were renewed since.
        self._replaced: list[Any] = []
        self._use(self._channels[0])

    async def connect(self) -> None:
        """Authenticates, the first time; aetcd calls this before each call."""
        if not self._connected.is_set():
            await self._authenticate(None)
            self._connected.set()

    async def close(self) -> None:
        self._connected.clear()
        for channel in (*self._replaced, *self._channels):
            await channel.close()

    async def call(self, send: Callable[[], Awaitable[T]], *, reads: bool = False) -> T:
        """Returns the result of `send`. Retries with another member, or with a new token, if etcd
        has certainly not applied the call, or if it only reads. In any case it stops using a
        member that fails.

        Raises what `send` raises: aetcd.ClientError or AioRpcError.
        """
        untried = len(self._channels)
        renewed = False
        while True:
            channel, metadata = self.channel, self.metadata
            try:
                return await send()
            except (aetcd.ClientError, rpc.AioRpcError) as exc:
                if status(exc) in UNREACHABLE:
                    untried -= 1
                    self._leave(channel)
                    if not untried or not (reads or _NEVER_SENT in details(exc)):
                        raise
                elif self._user is not None and not renewed and _is_stale(exc):
                    renewed = True
                    await self._authenticate(metadata)
                else:
                    raise

    async def range(self, request: Any) -> Any:
        """The whole reply to a RangeRequest; the results of aetcd's own calls hide the revision."""
        return await self.call(
            lambda: self.kvstub.Range(request, timeout=self.timeout_s, metadata=self.metadata)
        )

    def _use(self, channel: Any) -> None:
        self.channel = channel
        self.auth_stub = rpc.AuthStub(channel)
        self.kvstub = rpc.KVStub(channel)
        self.leasestub = rpc.LeaseStub(channel)

    def _leave(self, channel: Any) -> None:
        """Switches to the member after that of `channel`, unless another call did so. Files that
        have changed are read again."""
        if channel is not self.channel:
            return
        following = self._channels.index(channel) + 1
        self._renew()
        self._use(self._channels[following % len(self._channels)])

    def _renew(self) -> None:
        try:
            if (files := _files(self._address)) == self._files:
                return
            if self._address.tls is not None:
                self._address.tls.context()  # a pair that does not match would end all connections
        except ConfigError as exc:
            self._log_limit.log(logger, "%s What was read before stays in use.", exc)
            return
        self._files = files
        self._replaced += self._channels
        address = self._address
        self._channels = [self._backend.open_channel(host, address) for host in address.hosts]

    async def _authenticate(self, stale: Any) -> None:
        """Replaces the token `stale`, unless another call has. Raises AioRpcError."""
        if self._user is None:
            return
        async with self._authenticating:
            if self.metadata is not stale:
                return
            request = rpc.AuthenticateRequest(name=self._user, password=self._secret)
            try:
                reply = await self.auth_stub.Authenticate(request, timeout=self._timeout)
            except rpc.AioRpcError as exc:
                # As in etcd's own clients: credentials are ignored by a server without users.
                if _AUTH_IS_OFF not in details(exc):
                    raise
                self.metadata = None
            else:
                self.metadata = (("token", reply.token),)


def _files(address: ServerAddress) -> tuple[bytes | None, ...]:
    """Raises ConfigError."""
    return () if address.tls is None else address.tls.read()


def status(exc: BaseException | None) -> rpc.StatusCode | None:
    """The status code of etcd or gRPC, also of an error that aetcd has wrapped."""
    cause = exc.__cause__ if isinstance(exc, aetcd.ClientError) else exc
    return cause.code() if isinstance(cause, rpc.AioRpcError) else None


def details(exc: BaseException) -> str:
    """The error text of etcd or gRPC."""
    text = exc.details() if isinstance(exc, rpc.AioRpcError) else str(exc)
    return text or type(exc).__name__


def is_future_revision(exc: BaseException) -> bool:
    """Whether etcd reports that the requested revision does not exist yet."""
    return "future revision" in details(exc)


def _is_stale(exc: BaseException) -> bool:
    return any(sign in details(exc) for sign in _STALE_TOKEN)

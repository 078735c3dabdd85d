"""The store on etcd: single calls, and the start of leases and watches."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

import aetcd
from aetcd import rpc

from dynamo_lite.protocol.errors import ConfigError, LeaseLost, StartupError, StoreUnavailable
from dynamo_lite.runtime.address import parse_etcd_url, redact
from dynamo_lite.runtime.etcd.backend import SYSTEM_BACKEND, EtcdBackend
from dynamo_lite.runtime.etcd.client import UNREACHABLE, EtcdClient, details, status
from dynamo_lite.runtime.etcd.lease import EtcdLease, open_lease
from dynamo_lite.runtime.etcd.watch import EtcdWatch
from dynamo_lite.runtime.store import Lease, WatchEvent
from dynamo_lite.runtime.tls import tls_refusal

logger = logging.getLogger(__name__)

_PROBE_PAUSE_S = 0.05
#: Error texts of etcd and gRPC that come from a wrong URL, and their meanings.
_MEANINGS = (
    (r"authentication failed", "it refuses the user name or password"),
    (r"user name is empty", "it requires a user name and password: USER:PASSWORD@HOST"),
    (
        r"Handshake read failed",
        "it closes the connection in the TLS handshake; write http:// if it has no TLS",
    ),
    (
        r"failed to connect.*: Socket closed$",
        "it closes the connection; write https:// if it requires TLS",
    ),
)


class EtcdStore:
    """Implements `Store`. Belongs to the event loop in which it was entered.

    connect_timeout_s: longest wait for the first answer. A call that timed out may have been
    applied. backend: connections, the lease's thread and clocks.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 10.0,
        backend: EtcdBackend = SYSTEM_BACKEND,
    ):
        """url: see `parse_etcd_url`, whose ConfigError it raises."""
        self._url = redact(url)
        self._address = parse_etcd_url(url)
        self._connect_timeout_s = connect_timeout_s
        self._backend = backend
        self._connected: EtcdClient | None = None

    def __repr__(self) -> str:
        return f"EtcdStore({self._url}, {'open' if self._connected else 'closed'})"

    async def __aenter__(self) -> Self:
        """Raises StartupError when etcd does not reply in time, or refuses, and ConfigError when
        a file that its URL names cannot be read any more."""
        with self._errors():
            self._connected = EtcdClient(self._address, self._backend)
        try:
            await self._probe()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        client, self._connected = self._connected, None
        if client is not None:
            await client.close()

    async def get(self, key: str) -> bytes | None:
        found = await self._call(lambda client: client.get(key.encode()), reads=True)
        return None if found is None else found.value

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        found = await self._call(lambda client: client.get_prefix(prefix.encode()), reads=True)
        return {kv.key.decode(errors="replace"): kv.value for kv in found}

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        lease_id = lease.id if lease else None
        raw = key.encode()
        reply = await self._call(lambda client: client.put(raw, value, lease=lease_id), lease)
        _note(lease, raw, reply.header)

    async def create(self, key: str, value: bytes, *, lease: Lease | None = None) -> bool:
        return await self._put_if(lambda steps, raw: steps.create(raw) == 0, key, value, lease)

    async def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        if old is None:
            return await self.create(key, new)
        return await self._put_if(lambda steps, raw: steps.value(raw) == old, key, new)

    async def _put_if(
        self, holds: Callable[[Any, bytes], Any], key: str, value: bytes, lease: Lease | None = None
    ) -> bool:
        raw = key.encode()

        def send(client: Any) -> Awaitable[tuple[bool, Any]]:
            steps = client.transactions
            put = steps.put(raw, value, lease=lease.id if lease else None)
            return client.transaction(compare=[holds(steps, raw)], success=[put], failure=[])

        done, replies = await self._call(send, lease)
        if done:
            _note(lease, raw, replies[0].response_put.header)
        return done

    async def delete(self, key: str) -> bool:
        return await self._call(lambda client: client.delete(key.encode())) is not None

    async def revoke(self, lease_id: int) -> bool:
        try:
            await self._call(lambda client: client.revoke_lease(lease_id))
        except StoreUnavailable as exc:
            if _is_not_found(exc.__cause__):
                return False
            raise
        return True

    @contextlib.asynccontextmanager
    async def lease(self, ttl_s: float) -> AsyncIterator[Lease]:
        async with contextlib.AsyncExitStack() as stack:
            with self._errors():
                opening = open_lease(self._address, ttl_s, self._backend)
                lease = await stack.enter_async_context(opening)
            yield lease

    def watch(self, prefix: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        return contextlib.aclosing(EtcdWatch(self._client, prefix).events())

    @property
    def _client(self) -> EtcdClient:
        if self._connected is None:
            raise StoreUnavailable(f"etcd at {self._url}: not connected")
        return self._connected

    async def _call(
        self,
        send: Callable[[Any], Awaitable[Any]],
        lease: Lease | None = None,
        *,
        reads: bool = False,
    ) -> Any:
        """lease: the lease to which the call attaches a key. reads: whether it changes nothing."""
        with self._errors(lease):
            client = self._client
            try:
                return await client.call(lambda: send(client), reads=reads)
            except (aetcd.ClientError, rpc.AioRpcError) as exc:
                if lease is None or not _is_not_found(exc) or await lease.verify() is not None:
                    raise
            # A wiped store has the lease again, unless it is unavailable for the thread that
            # refreshes the lease.
            return await client.call(lambda: send(client))

    async def _probe(self) -> None:
        """Asks until etcd answers; connections are otherwise made at first use."""
        monotonic = self._backend.clock.monotonic
        deadline = monotonic() + self._connect_timeout_s
        while True:
            try:
                await self.get("\0")
                return
            except StoreUnavailable as exc:
                cause = exc.__cause__ or exc
                if status(cause) is rpc.StatusCode.PERMISSION_DENIED:
                    return  # etcd has replied: this user may not read that key
                refused = status(cause) not in UNREACHABLE or tls_refusal(details(cause))
                if refused or monotonic() >= deadline:
                    raise StartupError(f"cannot use {exc}") from exc
            await asyncio.sleep(_PROBE_PAUSE_S)

    @contextlib.contextmanager
    def _errors(self, lease: Lease | None = None) -> Iterator[None]:
        """Maps the client's errors. lease: the lease to which the call attaches a key."""
        if lease is not None and lease.loss is not None:
            raise LeaseLost(lease.id, lease.loss.value)
        try:
            yield
        except (aetcd.ClientError, rpc.AioRpcError) as exc:
            if lease is not None and lease.loss is not None:
                raise LeaseLost(lease.id, lease.loss.value) from exc
            if lease is not None and _is_not_found(exc):
                what = f"it does not have lease {lease.id:x} yet"
                raise StoreUnavailable(f"etcd at {self._url}: {what}") from exc
            raise StoreUnavailable(f"etcd at {self._url}: {_meaning(details(exc))}") from exc
        except TimeoutError as exc:
            raise StoreUnavailable(f"etcd at {self._url}: timeout, no answer in time") from exc
        except ConfigError as exc:
            raise ConfigError([f"etcd URL {self._url}: {exc}"]) from exc


def _meaning(text: str) -> str:
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, text):
            return meaning
    return tls_refusal(text) or text


def _note(lease: Lease | None, key: bytes, header: Any) -> None:
    if isinstance(lease, EtcdLease):
        lease.holds(key, header.revision)


def _is_not_found(exc: BaseException | None) -> bool:
    """Whether etcd has replied NOT_FOUND, which it does only for leases."""
    return status(exc) is rpc.StatusCode.NOT_FOUND

"""The store on etcd: single calls, and the start of leases and watches."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from aetcd import rpc

from dynamo_lite.protocol.errors import ConfigError, LeaseLost, StartupError, StoreUnavailable
from dynamo_lite.runtime.address import parse_etcd_url, redact
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.etcd.client import (
    UNREACHABLE,
    EtcdClient,
    OpenChannel,
    details,
    open_channel,
)
from dynamo_lite.runtime.etcd.lease import EtcdLease, open_lease
from dynamo_lite.runtime.etcd.watch import text, under, watch
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
    applied. clock: its boot time measures leases.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 10.0,
        open_channel: OpenChannel = open_channel,
        clock: Clock = SYSTEM_CLOCK,
    ):
        """url: see `parse_etcd_url`, whose ConfigError it raises."""
        self._url = redact(url)
        self._address = parse_etcd_url(url)
        self._connect_timeout_s = connect_timeout_s
        self._open_channel, self._clock = open_channel, clock
        self._connected: EtcdClient | None = None

    async def __aenter__(self) -> Self:
        """Raises StartupError when etcd does not reply in time, or refuses, and ConfigError when
        a file that its URL names cannot be read any more."""
        with self._errors():
            self._connected = EtcdClient(self._address, self._open_channel)
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
        found = (await self._call(rpc.RangeRequest(key=key.encode()))).kvs
        return found[0].value if found else None

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        reply = await self._call(rpc.RangeRequest(**under(prefix)))
        return {text(kv.key): kv.value for kv in reply.kvs}

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        put = _put(key, value, lease)
        _note(lease, put.key, (await self._call(put, lease)).header)

    async def create(self, key: str, value: bytes, *, lease: Lease | None = None) -> bool:
        return await self._put_if(key, None, value, lease)

    async def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        return await self._put_if(key, old, new)

    async def _put_if(
        self, key: str, old: bytes | None, new: bytes, lease: Lease | None = None
    ) -> bool:
        put = _put(key, new, lease)
        if old is None:
            expected: dict[str, Any] = {"target": rpc.Compare.CREATE, "create_revision": 0}
        else:
            expected = {"target": rpc.Compare.VALUE, "value": old}
        compare = rpc.Compare(key=put.key, result=rpc.Compare.EQUAL, **expected)
        steps = [rpc.RequestOp(request_put=put)]
        reply = await self._call(rpc.TxnRequest(compare=[compare], success=steps), lease)
        if reply.succeeded:
            _note(lease, put.key, reply.header)
        return reply.succeeded

    async def delete(self, key: str) -> bool:
        return (await self._call(rpc.DeleteRangeRequest(key=key.encode()))).deleted > 0

    async def revoke(self, lease_id: int) -> bool:
        try:
            await self._call(rpc.LeaseRevokeRequest(ID=lease_id))
        except StoreUnavailable as exc:
            if _is_not_found(exc.__cause__):
                return False
            raise
        return True

    @contextlib.asynccontextmanager
    async def lease(self, ttl_s: float) -> AsyncIterator[Lease]:
        async with contextlib.AsyncExitStack() as stack:
            with self._errors():
                opening = open_lease(self._client, ttl_s, self._clock)
                lease = await stack.enter_async_context(opening)
            yield lease

    def watch(self, prefix: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        return contextlib.aclosing(watch(self._client, prefix))

    @property
    def _client(self) -> EtcdClient:
        if self._connected is None:
            raise StoreUnavailable(f"etcd at {self._url}: not connected")
        return self._connected

    async def _call(self, request: Any, lease: Lease | None = None) -> Any:
        """lease: the lease to which the request attaches a key."""
        with self._errors(lease):
            client = self._client
            try:
                return await client.call(request)
            except rpc.AioRpcError as exc:
                if lease is None or not _is_not_found(exc) or await lease.verify() is not None:
                    raise
            # A wiped store has the lease again.
            return await client.call(request)

    async def _probe(self) -> None:
        """Asks until etcd answers; connections are otherwise made at first use."""
        monotonic = self._clock.monotonic
        deadline = monotonic() + self._connect_timeout_s
        while True:
            try:
                await self.get("\0")
                return
            except StoreUnavailable as exc:
                code = _code(exc.__cause__)
                if code is rpc.StatusCode.PERMISSION_DENIED:
                    return  # etcd has replied: this user may not read that key
                refused = code not in UNREACHABLE or tls_refusal(details(exc.__cause__ or exc))
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
        except rpc.AioRpcError as exc:
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


def _meaning(said: str) -> str:
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, said):
            return meaning
    return tls_refusal(said) or said


def _put(key: str, value: bytes, lease: Lease | None) -> Any:
    return rpc.PutRequest(key=key.encode(), value=value, lease=lease.id if lease else 0)


def _note(lease: Lease | None, key: bytes, header: Any) -> None:
    if isinstance(lease, EtcdLease):
        lease.holds(key, header.revision)


def _is_not_found(exc: BaseException | None) -> bool:
    """Whether etcd has replied NOT_FOUND, which it does only for leases."""
    return _code(exc) is rpc.StatusCode.NOT_FOUND


def _code(exc: BaseException | None) -> rpc.StatusCode | None:
    return exc.code() if isinstance(exc, rpc.AioRpcError) else None

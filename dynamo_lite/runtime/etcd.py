"""The store on etcd: connection options, unary calls, and where leases and watches start."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import aetcd
from aetcd import rpc

from dynamo_lite.protocol.errors import LeaseLost, StartupError, StoreUnavailable
from dynamo_lite.runtime.address import parse_etcd_url, redact
from dynamo_lite.runtime.etcd_lease import EtcdLease
from dynamo_lite.runtime.etcd_watch import EtcdWatch, open_watch
from dynamo_lite.runtime.store import Lease, LeaseLoss

logger = logging.getLogger(__name__)

_PROBE_PAUSE_S = 0.05

#: The defaults need 5 s to come back after an outage, and never notice a server that
#: hangs: the keepalive alone does not fire without the ping timeout.
_CHANNEL_OPTIONS = {
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    "grpc.keepalive_time_ms": 5000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
    # Snapshots of a large prefix exceed the default of 4 MiB.
    "grpc.max_receive_message_length": 64 << 20,
    # Two stores of one process share neither a connection nor its backoff.
    "grpc.use_local_subchannel_pool": 1,
}


class EtcdStore:
    """Implements `Store`. Belongs to the event loop in which it was entered.

    timeout_s: longest wait for the answer to one call; connect_timeout_s: for the
    first one. A call that timed out may have been applied.
    """

    def __init__(self, url: str, *, timeout_s: float = 2.0, connect_timeout_s: float = 10.0):
        """Raises ConfigError when `url` is not an etcd URL."""
        self._url = redact(url)
        self._address = parse_etcd_url(url)
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._connected: Any = None

    def __repr__(self) -> str:
        return f"EtcdStore({self._url}, {'open' if self._connected else 'closed'})"

    async def __aenter__(self) -> Self:
        """Raises StartupError when etcd does not answer in time, or refuses."""
        client: Any = aetcd.Client(
            self._address.host,
            self._address.port,
            username=self._address.user,
            password=self._address.password,
            timeout=self._timeout_s,  # pyright: ignore[reportArgumentType]
            options=_CHANNEL_OPTIONS,
        )
        self._connected = client
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
        with self._errors():
            found = await self._client.get(key.encode())
        return None if found is None else found.value

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        with self._errors():
            found = await self._client.get_prefix(prefix.encode())
        return {kv.key.decode(errors="replace"): kv.value for kv in found}

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        with self._errors(lease):
            await self._client.put(key.encode(), value, lease=lease.id if lease else None)

    async def create(self, key: str, value: bytes, *, lease: Lease | None = None) -> bool:
        raw = key.encode()
        with self._errors(lease):
            client = self._client
            steps = client.transactions
            put = steps.put(raw, value, lease=lease.id if lease else None)
            created, _ = await client.transaction(
                compare=[steps.create(raw) == 0], success=[put], failure=[]
            )
        return created

    async def delete(self, key: str) -> bool:
        with self._errors():
            return await self._client.delete(key.encode()) is not None

    async def revoke(self, lease_id: int) -> bool:
        try:
            with self._errors():
                await self._client.revoke_lease(lease_id)
        except StoreUnavailable as exc:
            if _is_not_found(exc.__cause__):
                return False
            raise
        return True

    @contextlib.asynccontextmanager
    async def lease(self, ttl_s: float) -> AsyncIterator[Lease]:
        lease = await self._grant(ttl_s)
        task = asyncio.create_task(lease.keep_alive(), name=f"keep lease {lease.id:x}")
        try:
            yield lease
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if lease.loss is None:
                lease.end(LeaseLoss.CLOSED)
                try:
                    await self.revoke(lease.id)
                except StoreUnavailable as exc:
                    logger.info("lease %x is left to expire: %s", lease.id, exc)

    @contextlib.asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[EtcdWatch]:
        async with open_watch(self._client, prefix, timeout_s=self._timeout_s) as watch:
            yield watch

    @property
    def _client(self) -> Any:
        if self._connected is None:
            raise StoreUnavailable(f"etcd at {self._url}: not connected")
        return self._connected

    async def _grant(self, ttl_s: float) -> EtcdLease:
        with self._errors():
            granted_at = time.monotonic()
            client = self._client
            # Not `client.lease`: its result hides the store's revision.
            reply = await client.leasestub.LeaseGrant(
                rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s)),
                timeout=self._timeout_s,
                metadata=client.metadata,
            )
        return EtcdLease(
            client, reply.ID, reply.TTL, granted_at=granted_at, revision=reply.header.revision
        )

    async def _probe(self) -> None:
        """Asks until etcd answers; connections are otherwise made at first use."""
        deadline = time.monotonic() + self._connect_timeout_s
        while True:
            try:
                with self._errors():
                    await self._client.connect()
                    await self._client.get(b"\0")
                return
            except StoreUnavailable as exc:
                if _code(exc.__cause__) is rpc.StatusCode.PERMISSION_DENIED:
                    return  # an answer: this user just may not read that key
                refused = not isinstance(
                    exc.__cause__, aetcd.ConnectionFailedError | aetcd.ConnectionTimeoutError
                )
                if refused or time.monotonic() >= deadline:
                    raise StartupError(f"cannot use {exc}") from exc
            await asyncio.sleep(_PROBE_PAUSE_S)

    @contextlib.contextmanager
    def _errors(self, lease: Lease | None = None) -> Iterator[None]:
        """Maps the client's errors; `lease` is the one that the call hangs a key on."""
        if lease is not None and lease.loss is not None:
            raise LeaseLost(lease.id, lease.loss.value)
        try:
            yield
        except aetcd.ClientError as exc:
            if lease is not None and _is_not_found(exc):
                raise LeaseLost(lease.id, "etcd does not know it") from exc
            reason = str(exc) or type(exc).__name__
            raise StoreUnavailable(f"etcd at {self._url}: {reason}") from exc
        except (rpc.AioRpcError, TimeoutError) as exc:
            reason = exc.details() if isinstance(exc, rpc.AioRpcError) else "no answer in time"
            raise StoreUnavailable(f"etcd at {self._url}: {reason}") from exc


def _is_not_found(exc: BaseException | None) -> bool:
    """Whether etcd said NOT_FOUND, which it does only of leases."""
    return _code(exc) is rpc.StatusCode.NOT_FOUND


def _code(exc: BaseException | None) -> rpc.StatusCode | None:
    cause = exc.__cause__ if isinstance(exc, aetcd.ClientError) else exc
    return cause.code() if isinstance(cause, rpc.AioRpcError) else None

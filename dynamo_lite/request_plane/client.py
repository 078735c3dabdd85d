"""The frontend's side: one connection per worker, for its requests and their tokens."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from dynamo_lite.protocol.errors import Refused, Unavailable
from dynamo_lite.protocol.generate import ADAPTER_LOAD_S, GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.connection import Connection
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.tasks import end_tasks

logger = logging.getLogger(__name__)

#: Timeout of the TCP connection to a worker and of its Welcome.
_CONNECT_TIMEOUT_S = 2.0


class RemoteGenerateClient:
    """An async context manager. Leaving it aborts running requests, without `on_lost`.

    After `submit` has returned, a request ends in exactly one way: a delta with a
    finish_reason, `abort`, or `on_lost`. If `submit` raises, the request runs on no worker.
    Deltas may arrive before `submit` returns.

    client_id: at most 128 characters, for the workers' logs.
    on_deltas, on_lost: see `base.py`.
    request_timeout_s: timeout of a worker's reply to a request, beside the load of an adapter, and
        the time for media on their way.
    certificates: of this process, for workers with TLS. component: the workers', which their
        certificates must name.
    """

    def __init__(
        self,
        client_id: str,
        on_deltas: OnDeltas,
        on_lost: OnLost,
        request_timeout_s: float = 5.0,
        on_drop: OnDrop = uncounted,
        certificates: Certificates | None = None,
        component: str = "VllmWorker",
    ):
        self._client_id = client_id
        self._certificates, self._component = certificates, component
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._request_timeout_s = request_timeout_s
        self._on_drop = on_drop
        self._connections: dict[str, Connection] = {}
        self._connecting: dict[str, asyncio.Task[Connection]] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        try:
            await end_tasks(*self._connecting.values())
        finally:
            closed = [connection.closed for connection in self._connections.values()]
            for connection in list(self._connections.values()):
                connection.leave()
        if closed:  # `wait`, because a cancel must not cancel the futures of the connections
            await asyncio.wait(closed)

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        """Submits `request` to `member`.

        Raises DeadlineExceeded, Unavailable or Refused. If it raises or is cancelled, no delta of
        the request is passed on, before or after.
        """
        address = member.transport.stream
        if not address:
            raise Unavailable(f"worker {member.lease_id:x} has no token stream")
        connection = await self._connection(member.transport)
        if any(connection.runs(request.request_id) for connection in self._connections.values()):
            raise Refused(f"request {request.request_id} is already running", elsewhere=False)
        timeout_s = self._request_timeout_s
        if request.adapter is not None:
            timeout_s += ADAPTER_LOAD_S
        await connection.submit(request, timeout_s)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cancels requests; no delta of them follows. Unknown and finished ids are ignored."""
        for connection in list(self._connections.values()):
            connection.cancel(request_ids)

    def retain(self, members: Iterable[EndpointRecord]) -> None:
        """Sets the live members, and connects to them. Connections to other workers are closed
        when they are idle."""
        live = {
            member.transport.stream: member.transport
            for member in members
            if member.transport.stream
        }
        for address, connection in list(self._connections.items()):
            connection.set_retired(address not in live)
        if not self._closed:
            for address in sorted(live):
                self._open_connection(live[address])

    def is_connected(self, member: EndpointRecord) -> bool:
        """Whether requests can be sent to it without connecting first."""
        connection = self._connections.get(member.transport.stream or "")
        return connection is not None and connection.is_open

    def drop(self, member: EndpointRecord, why: str) -> None:
        """Disconnects an unresponsive member. `on_lost` reports its requests a little later."""
        connection = self._connections.get(member.transport.stream or "")
        if connection is not None:
            connection.abort(why)

    async def _connection(self, transport: EndpointTransport) -> Connection:
        """Returns the open connection to a worker. Concurrent callers share one attempt."""
        if self._closed:
            raise Unavailable("the client is closed")
        found = self._open_connection(transport)
        if isinstance(found, Connection):
            return found
        # `wait`, because a cancel of this caller must not end the attempt of the others.
        await asyncio.wait([found])
        if found.cancelled():
            raise Unavailable("the client is closed")
        return found.result()

    def _open_connection(
        self, transport: EndpointTransport
    ) -> "Connection | asyncio.Task[Connection]":
        """Returns the open connection, or the task that opens it."""
        address = transport.stream or ""
        connection = self._connections.get(address)
        if connection is not None and connection.is_open:
            return connection
        connecting = self._connecting.get(address)
        if connecting is None:
            connecting = asyncio.create_task(self._connect(transport), name=f"connect {address}")
            self._connecting[address] = connecting
            connecting.add_done_callback(lambda task: self._connected(address, task))
        return connecting

    async def _connect(self, transport: EndpointTransport) -> Connection:
        connection = Connection(
            transport,
            self._client_id,
            self._on_deltas,
            self._on_lost,
            self._on_drop,
            self._certificates,
            self._component,
        )
        await connection.open(_CONNECT_TIMEOUT_S)
        return connection

    def _connected(self, address: str, task: asyncio.Task[Connection]) -> None:
        del self._connecting[address]
        if task.cancelled():
            return
        if exc := task.exception():
            logger.warning("worker at %s: connecting failed: %s", address, exc)
            return
        connection = task.result()
        if self._closed:
            connection.leave()
            return
        self._connections[address] = connection
        connection.closed.add_done_callback(lambda _: self._forget(address, connection))

    def _forget(self, address: str, connection: Connection) -> None:
        if self._connections.get(address) is connection:
            del self._connections[address]


#: Makes the transport of one owner. The owner gets the callbacks and enters the context.
MakeTransport = Callable[[OnDeltas, OnLost], RemoteGenerateClient]

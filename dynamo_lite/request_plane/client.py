"""The frontend's side: one connection per worker, for its requests and their tokens."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self

from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.generate import ADAPTER_LOAD_S, GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.connection import Connection
from dynamo_lite.request_plane.dialing import Dialer
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop, uncounted


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
        self._dialer = Dialer(client_id, certificates, component, on_drop)
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._request_timeout_s = request_timeout_s
        self._on_drop = on_drop
        self._connections: dict[str, Connection] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        closed = [connection.closed for connection in self._connections.values()]
        for connection in list(self._connections.values()):
            connection.leave()
        if closed:  # `wait`, because a cancel must not cancel the futures of the connections
            await asyncio.wait(closed)

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        """Submits `request` to `member`.

        No other worker has a request of its id. Raises DeadlineExceeded, Unavailable or Refused. If
        it raises or is cancelled, no delta of the request is passed on, before or after.
        """
        address = member.transport.stream
        if not address:
            raise Unavailable(f"worker {member.lease_id:x} has no token stream")
        connection = self._connection(member.transport)
        await connection.opened()
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
                self._connection(live[address])

    def is_connected(self, member: EndpointRecord) -> bool:
        """Whether requests can be sent to it without connecting first."""
        connection = self._connections.get(member.transport.stream or "")
        return connection is not None and connection.is_ready

    def drop(self, member: EndpointRecord, why: str) -> None:
        """Disconnects an unresponsive member. `on_lost` reports its requests a little later."""
        connection = self._connections.get(member.transport.stream or "")
        if connection is not None:
            connection.abort(why)

    def _connection(self, transport: EndpointTransport) -> Connection:
        """The connection to a worker, which may not be open yet."""
        if self._closed:
            raise Unavailable("the client is closed")
        address = transport.stream or ""
        connection = self._connections.get(address)
        if connection is None or connection.is_over:
            connection = self._connections[address] = Connection(
                transport, self._dialer, self._on_deltas, self._on_lost, self._on_drop
            )
            connection.closed.add_done_callback(partial(self._forget, address, connection))
        return connection

    def _forget(self, address: str, connection: Connection, _: object) -> None:
        if self._connections.get(address) is connection:
            del self._connections[address]


#: Makes the transport of one owner. The owner gets the callbacks and enters the context.
MakeTransport = Callable[[OnDeltas, OnLost], RemoteGenerateClient]

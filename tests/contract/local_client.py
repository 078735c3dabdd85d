"""GenerateClient of a server in the same process: no TCP."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Self

import msgspec

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import Refused, Unavailable
from dynamo_lite.protocol.generate import Accepted, GenerateRequest, RequestRefused, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.request_plane.session import Session

_CLIENT_ID = "local"


class LocalGenerateClient:
    """GenerateClient of the server in this process. `member` is ignored."""

    def __init__(self, server: GenerateServer, on_deltas: OnDeltas, on_lost: OnLost):
        self._server = server
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._session: Session | None = None
        self._pending: dict[str, asyncio.Future[Accepted | RequestRefused]] = {}

    async def __aenter__(self) -> Self:
        self._session = self._server.open_session(_CLIENT_ID, self)
        return self

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._server.close_session(session)

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        session, request_id = self._session, request.request_id
        if session is None:
            raise Unavailable("the worker in this process is closed")
        payload = encode(msgspec.structs.replace(request, client_id=_CLIENT_ID))
        replied = asyncio.get_running_loop().create_future()
        self._server.submit(session, request_id, payload, replied.set_result)
        self._pending[request_id] = replied
        try:
            await asyncio.wait({replied})
        except asyncio.CancelledError:
            self._server.cancel(session, [request_id])
            raise
        finally:
            self._pending.pop(request_id, None)
        if isinstance(reply := replied.result(), RequestRefused):
            raise Refused(
                reply.reason,
                elsewhere=reply.elsewhere,
                busy=reply.busy,
                retry_after_s=reply.retry_after_s,
            )

    async def abort(self, request_ids: Sequence[str]) -> None:
        if self._session is not None:
            self._server.cancel(self._session, request_ids)

    def retain(self, members: Iterable[EndpointRecord]) -> None:
        """There is no connection to close."""

    def is_connected(self, member: EndpointRecord) -> bool:
        return self._session is not None

    def drop(self, member: EndpointRecord, why: str) -> None:
        if (session := self._session) is None:
            return
        running = sorted(session.request_ids)
        self._server.close_session(session)
        self._session = self._server.open_session(_CLIENT_ID, self)
        self._lose(running, why)

    # DeltaSink

    def deliver(self, deltas: list[TokenDelta]) -> list[str]:
        self._on_deltas(deltas)
        return []

    def closed(self, request_ids: list[str], why: str) -> None:
        self._session = None
        self._lose(request_ids, why)

    def _lose(self, request_ids: list[str], why: str) -> None:
        """Those that were not accepted fail; of the others their owner is told."""
        lost = [request_id for request_id in request_ids if request_id not in self._pending]
        for replied in self._pending.values():
            if not replied.done():
                replied.set_exception(Unavailable(why))
        if lost:
            self._on_lost(lost, why)

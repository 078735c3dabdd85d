"""GenerateClient of a server in the same process: no NATS, no TCP, no encoding."""

import logging
from collections.abc import Iterable, Sequence
from typing import Self

from dynamo_lite.protocol.errors import DynamoLiteError, Refused, Unavailable
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.request_plane.session import Session

logger = logging.getLogger(__name__)


class LocalGenerateClient:
    """GenerateClient of the server in this process. `member` is ignored."""

    def __init__(
        self,
        server: GenerateServer,
        on_deltas: OnDeltas,
        on_lost: OnLost,
        *,
        client_id: str = "local",
    ):
        self._server = server
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._client_id = client_id
        self._session: Session | None = None

    async def __aenter__(self) -> Self:
        self._session = self._server.open_session(self._client_id, self)
        return self

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._server.close_session(session)

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        session = self._session
        if session is None:
            raise Unavailable("the worker in this process is closed")
        try:
            await self._server.admit(session, request)
        except DynamoLiteError:
            raise
        except Exception as exc:
            logger.exception("request %s: could not be started", request.request_id)
            raise Refused("internal error of the worker", elsewhere=False) from exc

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
        self._session = self._server.open_session(self._client_id, self)
        if running:
            self._on_lost(running, why)

    # DeltaSink

    def deliver(self, deltas: list[TokenDelta]) -> list[str]:
        try:
            self._on_deltas(deltas)
        except Exception:
            logger.exception("the receiver of deltas failed")
            lost = [delta.request_id for delta in deltas if delta.finish_reason is None]
            if lost:
                self._on_lost(lost, "the receiver of deltas failed")
            return lost
        return []

    def closed(self, request_ids: list[str], why: str) -> None:
        self._session = None
        if request_ids:
            self._on_lost(request_ids, why)

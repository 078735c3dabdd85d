"""Requests from the network: decoded, handed to the engine, and answered.

A request comes in on its session's own connection, or over NATS. The checks are the same.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError, Refused
from dynamo_lite.protocol.generate import (
    Accepted,
    GenerateRequest,
    RequestRefused,
    decode_generate_request,
)
from dynamo_lite.protocol.versions import unsupported
from dynamo_lite.request_plane.base import GenerateHandler
from dynamo_lite.request_plane.session import Session
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.tasks import OwnedTasks

if TYPE_CHECKING:
    from dynamo_lite.request_plane.server import GenerateServer

logger = logging.getLogger(__name__)

#: The reason of a refusal when the client of a request has no open session.
NO_STREAM = "no stream from this client"

#: Sends the reply to a request on its connection.
AnswerRequest = Callable[[Accepted | RequestRefused], None]


class RequestReceiver:
    """on_drop: called with "generate" for a malformed request on a connection."""

    def __init__(self, server: "GenerateServer", handler: GenerateHandler, on_drop: OnDrop):
        self._server, self._handler, self._on_drop = server, handler, on_drop
        self._tasks = OwnedTasks()

    async def end(self) -> None:
        """Ends the requests that the engine is still accepting."""
        await self._tasks.end()

    def submit(
        self, session: Session, request_id: str, payload: bytes, reply: AnswerRequest
    ) -> None:
        """Takes a request of the session's connection. From now on it is in flight.

        payload: the encoded GenerateRequest. A malformed one is counted and refused. The engine
        accepts it in a task of its own, so that the connection's next frames are read meanwhile.
        The task is cancelled when the session ends. reply: called once, unless that happens.
        """
        try:
            request = self._decode(session, request_id, payload)
            self._server.begin(session, request)
        except Refused as exc:
            reply(_refusal(exc))
            return
        task = self._tasks.start(self._try(request), name=f"hand over {request_id}")
        session.handing_over[task] = None
        task.add_done_callback(partial(self._tried, session, request_id, reply))

    async def on_request(self, payload: bytes) -> bytes:
        """The reply to a request over NATS. Raises ProtocolError when it is malformed."""
        request = decode_generate_request(payload)
        try:
            await self._admit(request)
        except Exception as exc:
            return encode(_refused(request.request_id, exc))
        return encode(Accepted())

    async def _admit(self, request: GenerateRequest) -> None:
        """Raises Refused, or the handler's exception."""
        _check_version(request)
        session = self._server.session(request.client_id)
        if session is None:
            raise Refused(NO_STREAM, elsewhere=False)
        if request.request_id in session.early_cancels:
            del session.early_cancels[request.request_id]
            raise Refused(f"request {request.request_id} was cancelled", elsewhere=True)
        await self._server.admit(session, request)

    def _decode(self, session: Session, request_id: str, payload: bytes) -> GenerateRequest:
        """Raises Refused."""
        try:
            request = decode_generate_request(payload)
            if (request.request_id, request.client_id) != (request_id, session.client_id):
                raise ProtocolError("its ids are not those of its frame and its connection")
        except ProtocolError as exc:
            logger.warning("request %s: refused: %s", request_id, exc)
            self._on_drop("generate")
            raise Refused(str(exc), elsewhere=False) from exc
        _check_version(request)
        return request

    async def _try(self, request: GenerateRequest) -> Exception | None:
        """Hands the request to the engine. Returns why the engine has not accepted it."""
        try:
            await self._handler.submit(request)
        except Exception as exc:
            return exc
        return None

    def _tried(
        self,
        session: Session,
        request_id: str,
        reply: AnswerRequest,
        task: asyncio.Task[Exception | None],
    ) -> None:
        """A callback of the task, since one that is cancelled before it runs executes nothing."""
        del session.handing_over[task]
        if task.cancelled():
            self._server.handed_over(request_id, asyncio.CancelledError())
            return
        failure = task.result()
        self._server.handed_over(request_id, failure)
        reply(Accepted() if failure is None else _refused(request_id, failure))


def _check_version(request: GenerateRequest) -> None:
    """Raises Refused."""
    if request.wire_version != WIRE_VERSION:
        raise Refused(unsupported(request.wire_version), elsewhere=True)


def _refused(request_id: str, failure: Exception) -> RequestRefused:
    """The reply to a request that did not begin."""
    if isinstance(failure, Refused):
        return _refusal(failure)
    if isinstance(failure, DynamoLiteError):
        return RequestRefused(reason=str(failure), elsewhere=True)
    logger.error("request %s: could not be started", request_id, exc_info=failure)
    return RequestRefused(reason="internal error of the worker", elsewhere=True)


def _refusal(refused: Refused) -> RequestRefused:
    return RequestRefused(
        reason=refused.reason,
        elsewhere=refused.elsewhere,
        busy=refused.busy,
        retry_after_s=refused.retry_after_s,
    )

"""The worker's side: requests are decoded, handed to the engine and answered; deltas go out.

A session is a TCP connection. Requests come in on it, and their deltas go out
through it, one frame per engine step and session. When a session ends, its requests are aborted.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError, Refused
from dynamo_lite.protocol.generate import (
    Accepted,
    GenerateRequest,
    RequestRefused,
    TokenDelta,
    decode_generate_request,
)
from dynamo_lite.protocol.options import AdmissionOptions
from dynamo_lite.request_plane.admission import Admission
from dynamo_lite.request_plane.base import GenerateHandler
from dynamo_lite.request_plane.framing import FrameConnection
from dynamo_lite.request_plane.listener import SessionListener
from dynamo_lite.request_plane.session import Session
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.tasks import OwnedTasks, all_of

logger = logging.getLogger(__name__)

#: How long closing waits for the engine to accept or abort requests.
_CLOSE_TIMEOUT_S = 5.0


@dataclass(eq=False)
class SessionRequest:
    """A request of a session, from its arrival until the engine does not know it any more."""

    request_id: str
    session: Session
    #: Hands it to the engine; None when that is over.
    handover: asyncio.Task[None] | None = None
    #: No delta of it is sent any more.
    ended: bool = False


class GenerateServer:
    """Async context manager; listens for connections while it lasts.

    limits: see `Admission`. Requests beyond them are refused as busy, and go to another worker.
    on_drop: called with "generate" for a malformed request, with "stream" for a malformed frame or
    one connection without a Hello too many, with "certificate" for a client that is refused.
    certificates: of this worker, for TLS; clients must be Frontends of its graph. None: plain TCP.
    """

    def __init__(
        self,
        handler: GenerateHandler,
        bind_host: str = "127.0.0.1",
        *,
        limits: AdmissionOptions | None = None,
        on_drop: OnDrop = uncounted,
        certificates: Certificates | None = None,
    ):
        self._handler, self.on_drop = handler, on_drop
        self._listener = SessionListener(
            lambda: Session(self, self._listener), bind_host, certificates, on_drop
        )
        #: HOST:PORT for the clients' connections, for the endpoint's record.
        self.stream_address = ""
        self._admission = Admission(limits)
        #: Until the engine has refused, finished or aborted them.
        self._requests: dict[str, SessionRequest] = {}
        #: Handovers and aborts. `_tried` and `_abort` report those that fail.
        self._tasks = OwnedTasks(on_failure=lambda *_: None)
        #: Why all new requests are refused; None while they are not.
        self._refusal: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        """Raises StartupError when it cannot listen on the host."""
        self.stream_address = await self._listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        why = "the worker closed the stream"
        self.disconnect_all(why)
        await self._listener.close(why)
        if not await self.wait_idle(_CLOSE_TIMEOUT_S):
            logger.warning(
                "timeout after %g s: closed while the engine still accepts or aborts requests",
                _CLOSE_TIMEOUT_S,
            )
        await self._tasks.end()

    @property
    def in_flight(self) -> int:
        """Number of requests that have arrived and were not ended by a last delta, a cancel or
        the end of their session."""
        return sum(not one.ended or one.handover is not None for one in self._requests.values())

    @property
    def in_engine(self) -> int:
        """Number of requests that the engine has accepted, and that have not ended."""
        return sum(not one.ended and one.handover is None for one in self._requests.values())

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests without a first token."""
        return self._admission.waiting_tokens

    def limit(self, limits: AdmissionOptions) -> None:
        """Sets the limits for new requests."""
        self._admission.limit(limits)

    def refuse_new(self, reason: str) -> None:
        """Refuses every new request from now on. Other workers may accept it."""
        self._refusal = reason

    def disconnect_all(self, why: str) -> None:
        """To be called when the engine is dead: ends all sessions and refuses new requests."""
        self.refuse_new(why)
        for session in list(self._listener.sessions):
            self.abandon(session)
            session.close(why)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is in flight. Returns False after `timeout_s`."""
        await all_of([self._idle], timeout_s)
        return self._idle.is_set()

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """Sends the output of one engine step. Drops deltas of unknown or cancelled requests."""
        by_session: dict[Session, list[TokenDelta]] = {}
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None or request.ended:
                continue
            by_session.setdefault(request.session, []).append(delta)
            if delta.finish_reason is not None:
                self._end(request)
            elif delta.token_ids:
                self._admission.answered(delta.request_id)
        for session, mine in by_session.items():
            if undeliverable := session.deliver(mine):
                self.cancel(session, undeliverable)

    # Requests

    def abandon(self, session: FrameConnection) -> None:
        """Aborts the session's requests."""
        own = [one for one in self._requests.values() if one.session is session]
        self.cancel(session, [one.request_id for one in own])
        for one in own:
            if one.handover is not None:
                one.handover.cancel()

    def cancel(self, session: FrameConnection, request_ids: Sequence[str]) -> None:
        """Ends these requests; no delta of them is sent after this."""
        known = (self._requests.get(request_id) for request_id in request_ids)
        mine = [one for one in known if one and one.session is session and not one.ended]
        for one in mine:
            one.ended = True  # so that it is kept until it is aborted
            self._admission.leave(one.request_id)
        # Requests that the engine is still accepting are aborted when it has accepted them.
        self._abort_soon([one for one in mine if one.handover is None])

    def submit(self, session: Session, request_id: str, payload: bytes) -> None:
        """Takes a request of the session's connection. From now on it is in flight.

        payload: the encoded GenerateRequest. A malformed one is counted and refused. The engine
        accepts it in a task of its own, so that the connection's next frames are read meanwhile.
        The task is cancelled when the session ends. Unless that happens, one reply is sent.
        """
        try:
            request = self._decode(request_id, payload)
            self._check(request)
        except Refused as exc:
            session.reply(request_id, _refused(request_id, exc))
            return
        one = self._requests[request_id] = SessionRequest(request_id, session)
        self._idle.clear()
        handover = self._handler.submit(request)
        one.handover = self._tasks.start(handover, name=f"hand over {request_id}")
        one.handover.add_done_callback(partial(self._tried, one))

    def _decode(self, request_id: str, payload: bytes) -> GenerateRequest:
        """Raises Refused."""
        try:
            request = decode_generate_request(payload)
            if len(payload) - len(request.inputs or b"") > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"more than {MAX_MESSAGE_BYTES} bytes beside its inputs")
            if request.request_id != request_id:
                raise ProtocolError("its id is not that of its frame")
        except ProtocolError as exc:
            logger.warning("request %s: refused: %s", request_id, exc)
            self.on_drop("generate")
            raise Refused(str(exc), elsewhere=False) from exc
        return request

    def _tried(self, one: SessionRequest, task: asyncio.Task[None]) -> None:
        """A callback of the task, since one that is cancelled before it runs executes nothing."""
        one.handover = None
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._end(one)
        elif task.cancelled() or one.ended:
            # It was cancelled, or has finished; to abort a finished one does nothing.
            self._abort_soon([one])
        if not task.cancelled():
            reply = Accepted() if failure is None else _refused(one.request_id, failure)
            one.session.reply(one.request_id, reply)

    def _check(self, request: GenerateRequest) -> None:
        """Admits the request. Raises Refused."""
        request_id = request.request_id
        if self._refusal is not None:
            raise Refused(self._refusal, elsewhere=True)
        if request_id in self._requests:
            raise Refused(f"request {request_id} is already running here", elsewhere=True)
        prompt_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        busy = self._admission.enter(
            request_id,
            prompt_tokens,
            input_bytes=len(request.inputs or b""),
            promised=request.moved,
        )
        if busy is not None:
            raise Refused(busy, elsewhere=True, busy=True)

    # Ends

    def _end(self, one: SessionRequest) -> None:
        """The engine has ended it, or never had it."""
        one.ended = True
        self._admission.leave(one.request_id)
        if one.handover is None:
            self._forget([one])

    def _forget(self, requests: list[SessionRequest]) -> None:
        for one in requests:
            self._requests.pop(one.request_id, None)
        if not self._requests:
            self._idle.set()

    def _abort_soon(self, requests: list[SessionRequest]) -> None:
        if requests:
            self._tasks.start(self._abort(requests), name="generate-abort")

    async def _abort(self, requests: list[SessionRequest]) -> None:
        request_ids = [one.request_id for one in requests]
        try:
            await self._handler.abort(request_ids)
        except Exception:
            logger.exception("the engine failed to abort %s", request_ids)
        finally:
            self._forget(requests)


def _refused(request_id: str, failure: BaseException) -> RequestRefused:
    """The reply to a request that did not begin."""
    if isinstance(failure, Refused):
        reason, elsewhere, busy = failure.reason, failure.elsewhere, failure.busy
        return RequestRefused(reason=reason, elsewhere=elsewhere, busy=busy)
    if isinstance(failure, DynamoLiteError):
        return RequestRefused(reason=str(failure), elsewhere=True)
    logger.error("request %s: could not be started", request_id, exc_info=failure)
    return RequestRefused(reason="internal error of the worker", elsewhere=True)

"""The worker's side: who asked for which request, and where its deltas go.

Requests come in over NATS and are bound to the session (a TCP connection, or a
client in the same process) that they name; deltas go out through it, one frame
per engine step and session. A session that ends aborts what it asked for.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from dynamo_lite.policy.admission import Limits
from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError, Refused
from dynamo_lite.protocol.generate import (
    Accepted,
    GenerateRequest,
    RequestRefused,
    TokenDelta,
    decode_generate_request,
)
from dynamo_lite.request_plane.base import NO_STREAM, GenerateHandler
from dynamo_lite.request_plane.listener import Listener
from dynamo_lite.request_plane.session import AdmittedRequests, DeltaSink, Session
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.messaging import Messaging

_log = logging.getLogger(__name__)

#: Cancels remembered per session for requests that have not arrived yet.
_MAX_EARLY_CANCELS = 1024

#: How long closing waits for the engine to take or abort what it was given.
_CLOSE_TIMEOUT_S = 5.0


class GenerateServer:
    """Async context manager: listens while it lasts.

    `in_flight` counts requests from their arrival until their last delta, their
    cancel, or their session's end. max_in_flight, max_prompt_tokens: see
    `policy/admission.py`; what is beyond goes elsewhere.
    """

    def __init__(
        self,
        messaging: Messaging,
        handler: GenerateHandler,
        bind_host: str = "127.0.0.1",
        *,
        max_in_flight: int | None = None,
        max_prompt_tokens: int | None = None,
        on_drop: OnDrop = uncounted,
    ):
        self._messaging = messaging
        self._handler = handler
        self._on_drop = on_drop
        self._listener = Listener(self, bind_host, on_drop)
        self._sessions: dict[str, Session] = {}
        self._owned = AdmittedRequests(
            Limits(in_flight=max_in_flight, prompt_tokens=max_prompt_tokens), self._expire
        )
        self._owners = self._owned.owners
        self._submitting: set[str] = set()
        self._aborts: dict[asyncio.Task[None], list[str]] = {}
        self._refusal: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        await self._listener.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.hang_up("the worker closed the stream")
        await self._listener.close()
        if not await self.wait_idle(_CLOSE_TIMEOUT_S):
            _log.warning("closed while the engine was still taking or aborting requests")

    @property
    def stream_address(self) -> str:
        """HOST:PORT of the token stream, for the endpoint's record."""
        return self._listener.address

    @property
    def in_flight(self) -> int:
        return len(self._owners) + sum(i not in self._owners for i in self._submitting)

    @property
    def waiting_tokens(self) -> int:
        """Of prompts without a first token."""
        return self._owned.admission.waiting_tokens

    def has_client(self, client_id: str) -> bool:
        """Whether a session of this client is open."""
        return client_id in self._sessions

    def limit(self, limits: Limits) -> None:
        """Holds for new requests from here on."""
        self._owned.admission.limit(limits)

    def refuse_new(self, reason: str) -> None:
        """From here on every new request is refused; other workers may take it."""
        self._refusal = reason

    def hang_up(self, why: str) -> None:
        """The engine is gone: every client is told so now, and new requests are refused."""
        self.refuse_new(why)
        for session in list(self._sessions.values()):
            self._dismiss(session, why)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing was in flight any more within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def serve(self, subject: str) -> AsyncIterator[None]:
        """Takes requests on `subject` while the context lasts."""
        handler = counted(self._on_request, "generate", self._on_drop)
        async with self._messaging.serve(subject, handler):
            yield

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """One engine step's output. Deltas of unknown (cancelled) requests are dropped."""
        owners, admission = self._owners, self._owned.admission
        by_session: dict[Session, list[TokenDelta]] = {}
        for delta in deltas:
            session = owners.get(delta.request_id)
            if session is None:
                continue
            mine = by_session.get(session)
            if mine is None:
                by_session[session] = [delta]
            else:
                mine.append(delta)
            if delta.finish_reason is not None:
                self._owned.release(delta.request_id)
            elif delta.token_ids:
                admission.answered(delta.request_id)
        for session, mine in by_session.items():
            undeliverable = session.outlet.deliver(mine)
            if undeliverable:
                self.cancel(session, [i for i in undeliverable if owners.get(i) is session])
        self._update_idle()

    # Sessions

    def open_session(self, client_id: str, outlet: DeltaSink) -> Session:
        """Raises ProtocolError when the client has one already.

        A client's connections have ids of their own, so that a repeated `Hello`
        is somebody else's; it must not cost the first one its requests.
        """
        if client_id in self._sessions:
            raise ProtocolError(f"client {client_id!r} is connected already")
        session = self._sessions[client_id] = Session(client_id, outlet)
        return session

    def close_session(self, session: Session) -> None:
        """Aborts everything that was asked through it."""
        if self._sessions.get(session.client_id) is session:
            del self._sessions[session.client_id]
            self.cancel(session, sorted(session.request_ids))

    def _dismiss(self, session: Session, why: str) -> None:
        running = sorted(session.request_ids)
        self.close_session(session)
        session.outlet.closed(running, why)

    def cancel(self, session: Session, request_ids: Sequence[str]) -> None:
        """Nobody waits for these any more: no delta of them goes out after this."""
        running: list[str] = []
        for request_id in request_ids:
            if self._owners.get(request_id) is session:
                self._owned.release(request_id)
                running.append(request_id)
            else:
                # TCP may overtake NATS: the request itself may be yet to come.
                session.early_cancels[request_id] = None
                if len(session.early_cancels) > _MAX_EARLY_CANCELS:
                    del session.early_cancels[next(iter(session.early_cancels))]
        # Requests that the handler is still taking are aborted when it has them.
        taken = [i for i in running if i not in self._submitting]
        if taken:
            self._abort_soon(taken)
        self._update_idle()

    async def admit(self, session: Session, request: GenerateRequest) -> None:
        """Raises Refused, or what the handler raised; then the request runs nowhere."""
        request_id = request.request_id
        self._check(session, request)
        self._owned.enter(session, request)
        self._submitting.add(request_id)
        try:
            await self._handler.submit(request)
            # Finished and cancelled requests have both lost their owner by now;
            # to abort a finished one does nothing.
            if request_id not in self._owners:
                self._abort_soon([request_id])
        except BaseException as exc:
            self._owned.release(request_id)
            if isinstance(exc, asyncio.CancelledError):
                self._abort_soon([request_id])
            raise
        finally:
            self._submitting.discard(request_id)
            self._update_idle()

    def _check(self, session: Session, request: GenerateRequest) -> None:
        request_id = request.request_id
        if self._refusal is not None:
            raise Refused(self._refusal, elsewhere=True)
        if self._sessions.get(session.client_id) is not session:
            raise Refused(NO_STREAM, elsewhere=False)
        if self._knows(request_id):
            raise Refused(f"request {request_id} runs here already", elsewhere=True)
        if request_id in session.early_cancels:
            del session.early_cancels[request_id]
            raise Refused(f"request {request_id} was cancelled", elsewhere=True)

    def _expire(self, request_id: str) -> None:
        """Its time is up. Its client's clock says the same, unless it does not look."""
        session = self._owners[request_id]
        self.cancel(session, [request_id])
        session.outlet.deliver(
            [TokenDelta(request_id=request_id, token_ids=[], finish_reason="abort")]
        )

    # Requests over NATS

    async def _on_request(self, payload: bytes) -> bytes:
        request = decode_generate_request(payload)
        try:
            await self._admit_remote(request)
        except Refused as exc:
            return encode(
                RequestRefused(
                    reason=exc.reason,
                    elsewhere=exc.elsewhere,
                    busy=exc.busy,
                    retry_after_s=exc.retry_after_s,
                )
            )
        except DynamoLiteError as exc:
            return encode(RequestRefused(reason=str(exc), elsewhere=True))
        except Exception:
            _log.exception("request %s could not be started", request.request_id)
            return encode(RequestRefused(reason="internal error of the worker", elsewhere=True))
        return encode(Accepted())

    async def _admit_remote(self, request: GenerateRequest) -> None:
        if request.wire_version != WIRE_VERSION:
            raise Refused(f"wire version {request.wire_version} is not spoken", elsewhere=True)
        session = self._sessions.get(request.client_id)
        if session is None:
            raise Refused(NO_STREAM, elsewhere=False)
        await self.admit(session, request)

    # Bookkeeping

    def _knows(self, request_id: str) -> bool:
        return (
            request_id in self._owners
            or request_id in self._submitting
            or any(request_id in ids for ids in self._aborts.values())
        )

    def _abort_soon(self, request_ids: list[str]) -> None:
        task = asyncio.create_task(self._abort(request_ids), name="generate-abort")
        self._aborts[task] = request_ids
        task.add_done_callback(self._abort_done)

    async def _abort(self, request_ids: list[str]) -> None:
        try:
            await self._handler.abort(request_ids)
        except Exception:
            _log.exception("the engine could not abort %s", request_ids)

    def _abort_done(self, task: asyncio.Task[None]) -> None:
        del self._aborts[task]
        self._update_idle()

    def _update_idle(self) -> None:
        if self._owners or self._submitting or self._aborts:
            self._idle.clear()
        else:
            self._idle.set()

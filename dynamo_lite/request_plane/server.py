"""The worker's side: which session a request belongs to, and where its deltas go.

A session is a TCP connection. Requests come in on the connection, or over NATS with the id of
their session. Deltas go out through the session, one frame per engine step and session. When a
session ends, its requests are aborted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from dynamo_lite.policy.routing.admission import Limits
from dynamo_lite.protocol.errors import ProtocolError, Refused
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.request_plane.base import GenerateHandler
from dynamo_lite.request_plane.listener import Listener
from dynamo_lite.request_plane.receiver import NO_STREAM, RequestReceiver
from dynamo_lite.request_plane.session import AdmittedRequests, DeltaSink, Session
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.own_certificate import OwnCertificate
from dynamo_lite.runtime.secret import GraphSecret
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: How many cancels are kept per session for requests that have not arrived yet.
_MAX_EARLY_CANCELS = 1024

#: How long closing waits for the engine to accept or abort requests.
_CLOSE_TIMEOUT_S = 5.0


class GenerateServer:
    """Async context manager; listens for connections while it lasts.

    max_in_flight, max_prompt_tokens: limits, see `policy/routing/admission.py`. Requests beyond
    them are refused as busy, and go to another worker. secret: the graph's, which clients must
    have. certificate: for connections over TLS.
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
        secret: GraphSecret | None = None,
        certificate: OwnCertificate | None = None,
    ):
        self._messaging = messaging
        self._handler = handler
        self._on_drop = on_drop
        self._receiver = RequestReceiver(self, handler, on_drop)
        self._listener = Listener(
            self,
            self._receiver.submit,
            bind_host,
            on_drop,
            secret=secret,
            certificate=certificate,
        )
        self._sessions: dict[str, Session] = {}
        self._owned = AdmittedRequests(
            Limits(in_flight=max_in_flight, prompt_tokens=max_prompt_tokens), self._expire
        )
        self._owners = self._owned.owners
        #: Requests that the engine is still accepting.
        self._submitting: set[str] = set()
        #: Requests that the engine is aborting, and the tasks that wait for it.
        self._aborting: set[str] = set()
        self._aborts = OwnedTasks(on_end=self._update_idle)
        #: Why all new requests are refused; None while they are not.
        self._refusal: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        await self._listener.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.disconnect_all("the worker closed the stream")
        await self._listener.close()
        if not await self.wait_idle(_CLOSE_TIMEOUT_S):
            logger.warning(
                "timeout after %g s: closed while the engine still accepts or aborts requests",
                _CLOSE_TIMEOUT_S,
            )
        await self._receiver.end()
        await self._aborts.end()

    @property
    def stream_address(self) -> str:
        """HOST:PORT for the clients' connections, for the endpoint's record."""
        return self._listener.address

    @property
    def in_flight(self) -> int:
        """Number of requests that have arrived and were not ended by a last delta, a cancel or
        the end of their session."""
        return len(self._owners) + sum(i not in self._owners for i in self._submitting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests without a first token."""
        return self._owned.admission.waiting_tokens

    def session(self, client_id: str) -> Session | None:
        """The open session of this client, if it has one."""
        return self._sessions.get(client_id)

    def limit(self, limits: Limits) -> None:
        """Sets the limits for new requests."""
        self._owned.admission.limit(limits)

    def refuse_new(self, reason: str) -> None:
        """Refuses every new request from now on. Other workers may accept it."""
        self._refusal = reason

    def disconnect_all(self, why: str) -> None:
        """To be called when the engine is dead: ends all sessions and refuses new requests."""
        self.refuse_new(why)
        for session in list(self._sessions.values()):
            self._disconnect(session, why)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is in flight. Returns False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def serve(self, subject: str) -> AsyncIterator[None]:
        """Serves requests on `subject` while the context lasts."""
        handler = counted(self._receiver.on_request, "generate", self._on_drop)
        async with self._messaging.serve(subject, handler):
            yield

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """Sends the output of one engine step. Drops deltas of unknown or cancelled requests."""
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
        """Raises ProtocolError when the client has an open session already.

        Each connection of a client has an id of its own. So a repeated `Hello` comes from
        another client, and must not end the requests of the first one.
        """
        if client_id in self._sessions:
            raise ProtocolError(f"client {client_id!r} is already connected")
        session = self._sessions[client_id] = Session(client_id, outlet)
        return session

    def close_session(self, session: Session) -> None:
        """Ends the session and aborts its requests."""
        if self._sessions.get(session.client_id) is session:
            del self._sessions[session.client_id]
            self.cancel(session, sorted(session.request_ids))
            for task in session.handing_over:
                task.cancel()

    def _disconnect(self, session: Session, why: str) -> None:
        running = sorted(session.request_ids)
        self.close_session(session)
        session.outlet.closed(running, why)

    def cancel(self, session: Session, request_ids: Sequence[str]) -> None:
        """Ends these requests; no delta of them is sent after this."""
        running: list[str] = []
        for request_id in request_ids:
            if self._owners.get(request_id) is session:
                self._owned.release(request_id)
                running.append(request_id)
            else:
                # TCP may overtake NATS: the request itself may not have arrived yet.
                session.early_cancels[request_id] = None
                if len(session.early_cancels) > _MAX_EARLY_CANCELS:
                    del session.early_cancels[next(iter(session.early_cancels))]
        # Requests that the engine is still accepting are aborted when it has accepted them.
        accepted = [i for i in running if i not in self._submitting]
        if accepted:
            self._abort_soon(accepted)
        self._update_idle()

    async def admit(self, session: Session, request: GenerateRequest) -> None:
        """Raises Refused, or the handler's exception; then the request does not run here."""
        self.begin(session, request)
        try:
            await self._handler.submit(request)
        except BaseException as exc:
            self.handed_over(request.request_id, exc)
            raise
        self.handed_over(request.request_id, None)

    def begin(self, session: Session, request: GenerateRequest) -> None:
        """From now on the request is in flight. Raises Refused."""
        self._check(session, request)
        self._owned.enter(session, request)
        self._submitting.add(request.request_id)
        self._update_idle()

    def handed_over(self, request_id: str, failure: BaseException | None) -> None:
        """The engine has accepted the request, or failed to (`failure`)."""
        self._submitting.discard(request_id)
        if failure is not None:
            self._owned.release(request_id)
        # A request without an owner has finished or was cancelled. To abort a finished one does
        # nothing.
        ended = failure is None and request_id not in self._owners
        if ended or isinstance(failure, asyncio.CancelledError):
            self._abort_soon([request_id])
        self._update_idle()

    def _check(self, session: Session, request: GenerateRequest) -> None:
        request_id = request.request_id
        if self._refusal is not None:
            raise Refused(self._refusal, elsewhere=True)
        if self._sessions.get(session.client_id) is not session:
            raise Refused(NO_STREAM, elsewhere=False)
        if self._knows(request_id):
            raise Refused(f"request {request_id} is already running here", elsewhere=True)

    def _expire(self, request_id: str) -> None:
        """Ends a request after its timeout. Its client does the same, unless it is stuck."""
        session = self._owners[request_id]
        self.cancel(session, [request_id])
        session.outlet.deliver(
            [TokenDelta(request_id=request_id, token_ids=[], finish_reason="abort")]
        )

    # Bookkeeping

    def _knows(self, request_id: str) -> bool:
        return (
            request_id in self._owners
            or request_id in self._submitting
            or request_id in self._aborting
        )

    def _abort_soon(self, request_ids: list[str]) -> None:
        self._aborting.update(request_ids)
        self._aborts.start(self._abort(request_ids), name="generate-abort")

    async def _abort(self, request_ids: list[str]) -> None:
        try:
            await self._handler.abort(request_ids)
        except Exception:
            logger.exception("the engine failed to abort %s", request_ids)
        finally:
            self._aborting.difference_update(request_ids)

    def _update_idle(self) -> None:
        if self._owners or self._submitting or self._aborts:
            self._idle.clear()
        else:
            self._idle.set()

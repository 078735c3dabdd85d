"""One connection from a frontend to a worker, and the requests that run on it."""

import asyncio
import logging
from collections.abc import Iterable

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES, encode
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    ProtocolError,
    Refused,
    Unavailable,
)
from dynamo_lite.protocol.generate import (
    MAX_DELTA_BYTES,
    MAX_SUBMIT_BYTES,
    Accepted,
    Cancel,
    Deltas,
    GenerateRequest,
    RequestRefused,
    Submit,
    SubmitReply,
    TokenDelta,
    Welcome,
    decode_worker_frame,
)
from dynamo_lite.protocol.records import EndpointTransport
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.dialing import Dialer
from dynamo_lite.request_plane.framing import (
    FrameConnection,
    frame,
)
from dynamo_lite.runtime.drops import OnDrop, uncounted

logger = logging.getLogger(__name__)

#: A worker that is not registered any more and sends nothing for this long is disconnected: one
#: that is frozen gives its requests no end.
RETIRED_SILENCE_S = 60.0
#: Prompts' media may be sent as slowly as this.
_SLOWEST_BYTES_S = 4e6


class Connection(FrameConnection):
    """One TCP connection to a worker, and the state of the requests on it.

    A request is pending from `submit` until the worker's reply, then running. An engine may give
    tokens before it has confirmed a request, so a delta also shows acceptance.
    dialer: opens it.
    """

    def __init__(
        self,
        transport: EndpointTransport,
        dialer: Dialer,
        on_deltas: OnDeltas,
        on_lost: OnLost,
        on_drop: OnDrop = uncounted,
    ):
        super().__init__(max_bytes=MAX_DELTA_BYTES, on_drop=on_drop)
        self._address = transport.stream or ""
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        #: Ids of pending and running requests.
        self._wanted: set[str] = set()
        #: Pending requests. The result is the error that `submit` raises, or None.
        self._pending: dict[str, asyncio.Future[DynamoLiteError | None]] = {}
        #: Held while a request waits for room in the write buffer: one request is queued at a
        #: time, in the order of their submits.
        self._sending = asyncio.Lock()
        #: Bytes of the media of requests that wait for room.
        self._waiting_bytes = 0
        #: Set while the worker is not registered.
        self._retired = False
        self._silence: asyncio.TimerHandle | None = None
        opening = dialer.open(self, transport)
        self._opening = asyncio.create_task(opening, name=f"connect {self._address}")
        self._opening.add_done_callback(self._opening_ended)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent on it: the worker has answered its Hello."""
        return self._opening.done() and self.is_open

    @property
    def is_over(self) -> bool:
        """Whether no further request can be sent on it."""
        return self.closed.done() or (self._opening.done() and not self.is_open)

    async def opened(self) -> None:
        """Returns when it is open. Raises Unavailable or DeadlineExceeded."""
        # `wait`, because a cancel of this caller must not end what others wait for, too.
        await asyncio.wait([self._opening])
        if self._opening.cancelled():
            raise Unavailable("the client is closed")
        self._opening.result()

    def _opening_ended(self, opening: asyncio.Task[None]) -> None:
        failure = None if opening.cancelled() else opening.exception()
        if failure is not None:
            logger.warning("worker at %s: connecting failed: %s", self._address, failure)
        if self._transport is None and not self.closed.done():
            self.closed.set_result("no connection was made")

    async def submit(self, request: GenerateRequest, timeout_s: float) -> None:
        """As `RemoteGenerateClient.submit`. timeout_s: with the wait for room in the buffer, and
        without the time for media that are sent before this request or with it."""
        request_id, media = request.request_id, len(request.inputs or b"")
        if self.closed.done():
            raise self._broken()
        if request_id in self._wanted:
            raise Refused(f"request {request_id} is already running", elsewhere=False)
        loop = asyncio.get_running_loop()
        timeout_s += (self._unsent() + self._waiting_bytes + media) / _SLOWEST_BYTES_S
        deadline = loop.time() + timeout_s
        replied = self._pending[request_id] = loop.create_future()
        self._wanted.add(request_id)
        try:
            await self._send(request, deadline)
            await asyncio.wait({replied}, timeout=max(deadline - loop.time(), 0.0))
        except BaseException:
            self.cancel([request_id])
            raise
        if not replied.done():
            self.cancel([request_id])
            raise DeadlineExceeded(f"request to the worker at {self._address}", timeout_s)
        if (error := replied.result()) is not None:
            raise error

    def _frame_of(self, request: GenerateRequest) -> bytes:
        """Raises Refused when the request is too large for a frame."""
        payload = encode(Submit(request_id=request.request_id, request=encode(request)))
        text = len(payload) - len(request.inputs or b"")
        if text > MAX_MESSAGE_BYTES:
            raise Refused(
                f"the request has {text} bytes, and a message to a worker at most"
                f" {MAX_MESSAGE_BYTES}",
                elsewhere=False,
            )
        return frame(payload, MAX_SUBMIT_BYTES)

    async def _send(self, request: GenerateRequest, deadline: float) -> None:
        """Queues the request's frame as soon as the worker reads; not after `deadline`, and not if
        the request has been cancelled meanwhile. Raises Refused, as `_frame_of`."""
        media = len(request.inputs or b"")
        self._waiting_bytes += media
        try:
            async with asyncio.timeout_at(deadline), self._sending:
                await self.wait_writable()
                if request.request_id in self._wanted:
                    # Made now: a request that waits holds its media once.
                    self.send(self._frame_of(request))
        except TimeoutError:
            pass
        finally:
            self._waiting_bytes -= media

    def _broken(self) -> Unavailable:
        return Unavailable(f"the worker's stream broke: {self.closed.result()}")

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drops these requests and sends a Cancel for those that are on this connection."""
        mine = [i for i in request_ids if i in self._wanted]
        if mine:
            self._wanted.difference_update(mine)
            for request_id in mine:
                self._resolve(request_id, None)
            self.send(frame(encode(Cancel(request_ids=mine))))
            self._close_if_retired()

    def set_retired(self, retired: bool) -> None:
        """Marks the worker as left. The connection is closed when no request is left on it."""
        if retired == self._retired:
            return
        self._retired = retired
        if retired:
            self._watch_silence()
            self._close_if_retired()
        elif self._silence is not None:
            self._silence.cancel()

    def leave(self) -> None:
        """Closes without `on_lost`. The worker aborts the requests."""
        self._wanted.clear()
        self._opening.cancel()
        self.abort("the client closed")

    # FrameConnection

    def frame_received(self, payload: bytes) -> None:
        message = decode_worker_frame(payload)
        if not (self.greeted.done() or isinstance(message, Welcome)):
            raise ProtocolError("a frame before the Welcome")
        match message:
            case Deltas(deltas=deltas):
                self._receive_deltas(deltas)
            case SubmitReply(request_id=request_id, reply=reply):
                self._receive_reply(request_id, reply)
            case Welcome():
                pass  # see `greeted`

    def _receive_reply(self, request_id: str, reply: Accepted | RequestRefused) -> None:
        if request_id not in self._pending:
            return  # it was cancelled, or a delta has shown its acceptance
        if isinstance(reply, Accepted):
            self._resolve(request_id, None)
            return
        self._wanted.discard(request_id)
        self._resolve(
            request_id,
            Refused(reply.reason, elsewhere=reply.elsewhere, busy=reply.busy),
        )
        self._close_if_retired()

    def _receive_deltas(self, received: list[TokenDelta]) -> None:
        wanted = self._wanted
        deltas = [delta for delta in received if delta.request_id in wanted]
        if not deltas:
            return
        if self._pending:
            for delta in deltas:
                self._resolve(delta.request_id, None)
        for delta in deltas:
            if delta.finish_reason is not None:
                wanted.discard(delta.request_id)
        self._on_deltas(deltas)
        self._close_if_retired()

    def connection_closed(self, why: str) -> None:
        if self._silence is not None:
            self._silence.cancel()
        lost = sorted(i for i in self._wanted if i not in self._pending)
        self._wanted.clear()
        for request_id in list(self._pending):
            self._resolve(request_id, self._broken())
        if lost:
            logger.warning(
                "worker at %s: disconnected, %d requests lost: %s", self._address, len(lost), why
            )
            self._on_lost(lost, why)

    def _resolve(self, request_id: str, error: DynamoLiteError | None) -> None:
        """Ends the wait of a pending request's `submit`. Ignored when it is not pending."""
        replied = self._pending.pop(request_id, None)
        if replied is not None:
            replied.set_result(error)

    def _close_if_retired(self) -> None:
        if self._retired and not self._wanted:
            self.close("the worker left")

    def _watch_silence(self, frames_before: int = -1) -> None:
        if self._frames_received == frames_before:
            self.abort(f"the worker left and sent nothing for {RETIRED_SILENCE_S:g} s")
            return
        self._silence = asyncio.get_running_loop().call_later(
            RETIRED_SILENCE_S, self._watch_silence, self._frames_received
        )

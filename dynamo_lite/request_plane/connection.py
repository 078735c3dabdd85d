"""One connection from a frontend to a worker, and the requests that run on it."""

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
    Refused,
    Unavailable,
)
from dynamo_lite.protocol.generate import (
    Cancel,
    Deltas,
    GenerateRequest,
    Hello,
    RequestRefused,
    Welcome,
    decode_generate_reply,
    decode_worker_frame,
)
from dynamo_lite.request_plane.base import NO_STREAM, OnDeltas, OnLost
from dynamo_lite.request_plane.framing import FrameConnection, frame, parse_address
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import end_tasks

logger = logging.getLogger(__name__)

#: A worker that is not registered any more and sends nothing for this long is disconnected.
RETIRED_SILENCE_S = 60.0


class Connection:
    """One TCP connection to a worker, and the state of the requests on it.

    A request is pending from `submit` until the worker has accepted it, then running. Both the
    worker's reply over NATS and the first delta over TCP show acceptance; either may come first.
    """

    def __init__(
        self,
        address: str,
        client_id: str,
        on_deltas: OnDeltas,
        on_lost: OnLost,
        on_drop: OnDrop = uncounted,
    ):
        self._address = address
        self._on_drop = on_drop
        self._client_id = client_id
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        #: Ids of pending and running requests.
        self._wanted: set[str] = set()
        #: Ids of requests that the worker has not accepted yet.
        self._pending: set[str] = set()
        #: Set while the worker is not registered.
        self._retired = False
        self._silence: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._connection = FrameConnection(self, on_drop=on_drop)
        self._welcomed: asyncio.Future[None] = loop.create_future()
        #: Done when the connection is closed; the result is the reason.
        self.closed: asyncio.Future[str] = loop.create_future()

    def runs(self, request_id: str) -> bool:
        return request_id in self._wanted

    async def open(self, timeout_s: float) -> None:
        """Connects and waits for the Welcome. Raises Unavailable or DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        try:
            host, port = parse_address(self._address)
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: self._connection, host, port)
                self._connection.send(frame(encode(Hello(client_id=self._client_id))))
                await asyncio.wait(
                    {self._welcomed, self.closed}, return_when=asyncio.FIRST_COMPLETED
                )
        except TimeoutError as exc:
            raise DeadlineExceeded(f"connecting to the worker at {self._address}", timeout_s) from (
                exc
            )
        except (OSError, ValueError, ProtocolError) as exc:  # ValueError: an impossible host name
            raise Unavailable(f"cannot reach the worker at {self._address}: {exc}") from exc
        finally:
            if not self._welcomed.done():
                self._connection.abort("no Welcome from the worker")
        if self.closed.done():
            raise Unavailable(f"the worker at {self._address} disconnected: {self.closed.result()}")

    async def submit(
        self, messaging: Messaging, subject: str, request: GenerateRequest, timeout_s: float
    ) -> None:
        """See GenerateClient.submit."""
        request_id = request.request_id
        if self.closed.done():
            raise Unavailable(f"the worker's stream broke: {self.closed.result()}")
        payload = encode(msgspec.structs.replace(request, client_id=self._client_id))
        self._wanted.add(request_id)
        self._pending.add(request_id)
        try:
            await self._request(messaging, subject, payload, timeout_s)
            if self.closed.done():
                raise Unavailable(f"the worker's stream broke: {self.closed.result()}")
        except (NoResponders, Refused):
            if request_id in self._pending:
                self._wanted.discard(request_id)
                raise
        except (Unavailable, DeadlineExceeded):
            # The worker may have accepted the request. It has, if a delta has arrived.
            if request_id in self._pending:
                self.cancel([request_id])
                raise
        except BaseException:
            self.cancel([request_id])
            raise
        finally:
            self._pending.discard(request_id)
            self._close_if_retired()

    async def _request(
        self, messaging: Messaging, subject: str, payload: bytes, timeout_s: float
    ) -> None:
        """Returns when the worker has accepted or the connection is closed."""
        asking = asyncio.create_task(messaging.request(subject, payload, timeout_s=timeout_s))
        try:
            await asyncio.wait({asking, self.closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(asking)
            if not asking.cancelled():
                asking.exception()  # retrieved also when the caller was cancelled
        if asking.cancelled():
            return
        try:
            answer = asking.result()
        except ProtocolError as exc:  # above the broker's size limit
            raise Refused(str(exc), elsewhere=False) from exc
        try:
            reply = decode_generate_reply(answer)
        except ProtocolError as exc:
            self._on_drop("generate_reply")
            raise Unavailable(f"malformed reply of the worker: {exc}") from exc
        if isinstance(reply, RequestRefused):
            if reply.reason == NO_STREAM:
                self._connection.abort("the worker has no such stream")
                raise Unavailable(f"the worker at {self._address} has no such stream")
            raise Refused(
                reply.reason,
                elsewhere=reply.elsewhere,
                busy=reply.busy,
                retry_after_s=reply.retry_after_s,
            )

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drops these requests and sends a Cancel for those that are on this connection."""
        mine = [i for i in request_ids if i in self._wanted]
        if mine:
            self._wanted.difference_update(mine)
            self._pending.difference_update(mine)
            self._connection.send(frame(encode(Cancel(request_ids=mine))))
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

    def drop(self, why: str) -> None:
        """Disconnects. `on_lost` reports the running requests."""
        self._connection.abort(why)

    def leave(self) -> None:
        """Closes without `on_lost`. The worker aborts the requests."""
        self._wanted.clear()
        self._connection.abort("the client closed")

    # FrameReceiver

    def frame_received(self, connection: FrameConnection, payload: bytes) -> None:
        message = decode_worker_frame(payload)
        if isinstance(message, Welcome):
            if not self._welcomed.done():
                self._welcomed.set_result(None)
            return
        self._receive_deltas(message)

    def _receive_deltas(self, message: Deltas) -> None:
        wanted = self._wanted
        deltas = [delta for delta in message.deltas if delta.request_id in wanted]
        if not deltas:
            return
        if self._pending:
            self._pending.difference_update([delta.request_id for delta in deltas])
        for delta in deltas:
            if delta.finish_reason is not None:
                wanted.discard(delta.request_id)
        self._on_deltas(deltas)
        self._close_if_retired()

    def connection_closed(self, connection: FrameConnection, why: str) -> None:
        if self._silence is not None:
            self._silence.cancel()
        lost = sorted(i for i in self._wanted if i not in self._pending)
        self._wanted.clear()
        self.closed.set_result(why)
        if lost:
            logger.warning(
                "worker at %s: disconnected, %d requests lost: %s", self._address, len(lost), why
            )
            self._on_lost(lost, why)

    # Retirement

    def _close_if_retired(self) -> None:
        if self._retired and not self._wanted:
            self._connection.close("the worker left")

    def _watch_silence(self) -> None:
        self._silence = asyncio.get_running_loop().call_later(
            RETIRED_SILENCE_S, self._check_silence, self._connection.frames_received
        )

    def _check_silence(self, frames_before: int) -> None:
        if self._connection.frames_received == frames_before:
            self._connection.abort(f"the worker left and sent nothing for {RETIRED_SILENCE_S:g} s")
        else:
            self._watch_silence()

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

_log = logging.getLogger(__name__)

#: A worker that left the roster and says nothing for this long is given up.
RETIRED_SILENCE_S = 60.0


class Connection:
    """A request is pending from `submit` to its acceptance, then running.

    The first delta proves acceptance as well as the worker's answer does: they
    travel on different connections, in any order. `closed` is done, with the
    reason, when the connection is gone.
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
        self._wanted: set[str] = set()  # pending and running
        self._pending: set[str] = set()
        self._retired = False
        self._silence: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._connection = FrameConnection(self, on_drop=on_drop)
        self._welcomed: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[str] = loop.create_future()

    def runs(self, request_id: str) -> bool:
        return request_id in self._wanted

    async def open(self, timeout_s: float) -> None:
        """Connects and introduces itself. Raises Unavailable or DeadlineExceeded."""
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
        except (OSError, ValueError, ProtocolError) as exc:  # ValueError: no host can be called so
            raise Unavailable(f"cannot reach the worker at {self._address}: {exc}") from exc
        finally:
            if not self._welcomed.done():
                self._connection.abort("not welcomed")
        if self.closed.done():
            raise Unavailable(f"the worker at {self._address} hung up: {self.closed.result()}")

    async def submit(
        self, messaging: Messaging, subject: str, request: GenerateRequest, timeout_s: float
    ) -> None:
        """As GenerateClient.submit, over this connection."""
        request_id = request.request_id
        if self.closed.done():
            raise Unavailable(f"the worker's stream broke: {self.closed.result()}")
        payload = encode(msgspec.structs.replace(request, client_id=self._client_id))
        self._wanted.add(request_id)
        self._pending.add(request_id)
        try:
            await self._ask(messaging, subject, payload, timeout_s)
            if self.closed.done():
                raise Unavailable(f"the worker's stream broke: {self.closed.result()}")
        except (NoResponders, Refused):
            if request_id in self._pending:
                self._wanted.discard(request_id)
                raise
        except (Unavailable, DeadlineExceeded):
            # The worker may have the request; if it has shown so, it runs.
            if request_id in self._pending:
                self.cancel([request_id])
                raise
        except BaseException:
            self.cancel([request_id])
            raise
        finally:
            self._pending.discard(request_id)
            self._close_if_retired()

    async def _ask(
        self, messaging: Messaging, subject: str, payload: bytes, timeout_s: float
    ) -> None:
        """Returns when the worker accepted or the connection broke."""
        asking = asyncio.create_task(messaging.request(subject, payload, timeout_s=timeout_s))
        try:
            await asyncio.wait({asking, self.closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(asking)
            if not asking.cancelled():
                asking.exception()  # retrieved, also where a cancelled caller will not look
        if asking.cancelled():
            return
        try:
            answer = asking.result()
        except ProtocolError as exc:  # too large to be sent
            raise Refused(str(exc), elsewhere=False) from exc
        try:
            reply = decode_generate_reply(answer)
        except ProtocolError as exc:
            self._on_drop("generate_reply")
            raise Unavailable(f"unreadable answer of the worker: {exc}") from exc
        if isinstance(reply, RequestRefused):
            if reply.reason == NO_STREAM:
                self._connection.abort("the worker does not know this stream")
                raise Unavailable(f"the worker at {self._address} does not know this stream")
            raise Refused(
                reply.reason,
                elsewhere=reply.elsewhere,
                busy=reply.busy,
                retry_after_s=reply.retry_after_s,
            )

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forgets those that run here, and tells the worker."""
        mine = [i for i in request_ids if i in self._wanted]
        if mine:
            self._wanted.difference_update(mine)
            self._pending.difference_update(mine)
            self._connection.send(frame(encode(Cancel(request_ids=mine))))
            self._close_if_retired()

    def set_retired(self, retired: bool) -> None:
        """A retired connection is closed when nothing runs on it any more."""
        if retired == self._retired:
            return
        self._retired = retired
        if retired:
            self._watch_silence()
            self._close_if_retired()
        elif self._silence is not None:
            self._silence.cancel()

    def drop(self, why: str) -> None:
        """Cuts the connection; what runs on it is reported lost."""
        self._connection.abort(why)

    def leave(self) -> None:
        """Closes; the worker aborts what runs, and nothing is reported lost."""
        self._wanted.clear()
        self._connection.abort("the client closed")

    # FrameReceiver

    def frame_received(self, connection: FrameConnection, payload: bytes) -> None:
        message = decode_worker_frame(payload)
        if isinstance(message, Welcome):
            if not self._welcomed.done():
                self._welcomed.set_result(None)
            return
        self._take(message)

    def _take(self, message: Deltas) -> None:
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
            _log.warning("worker at %s: %d requests lost: %s", self._address, len(lost), why)
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
            self._connection.abort(f"the worker left and was silent for {RETIRED_SILENCE_S:g} s")
        else:
            self._watch_silence()

"""One client of a worker, on its connection, and its requests."""

import asyncio
import logging
from typing import TYPE_CHECKING

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES, WIRE_VERSION, encode
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.generate import (
    MAX_DELTA_BYTES,
    MAX_SUBMIT_BYTES,
    Accepted,
    Cancel,
    Deltas,
    Hello,
    RequestRefused,
    Submit,
    SubmitReply,
    TokenDelta,
    Welcome,
    decode_client_frame,
)
from dynamo_lite.protocol.versions import unsupported
from dynamo_lite.request_plane.framing import FrameConnection, frame

if TYPE_CHECKING:
    from dynamo_lite.request_plane.listener import SessionListener
    from dynamo_lite.request_plane.server import GenerateServer

logger = logging.getLogger(__name__)

#: Of a Hello, which anybody may send.
MAX_HELLO_BYTES = 1 << 16


class Session(FrameConnection):
    """The worker's end of a connection."""

    #: For the log; empty before the Hello.
    client_id = ""

    def __init__(self, server: "GenerateServer", listener: "SessionListener"):
        super().__init__(
            first_max_bytes=MAX_HELLO_BYTES,
            max_bytes=MAX_SUBMIT_BYTES,
            on_drop=server.on_drop,
            log_limit=listener.log_limit,
        )
        self._server, self._listener = server, listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.opened(self)

    def frame_received(self, payload: bytes) -> None:
        message = decode_client_frame(payload)
        if not (self.client_id or isinstance(message, Hello)):
            raise ProtocolError("a frame before the Hello")
        match message:
            case Hello():
                self._greet(message)
            case Submit(request_id=request_id, request=request):
                self._server.submit(self, request_id, request)
            case Cancel(request_ids=request_ids):
                self._server.cancel(self, request_ids)

    def _greet(self, hello: Hello) -> None:
        if hello.wire_version != WIRE_VERSION:
            raise ProtocolError(unsupported(hello.wire_version))
        if self.client_id:
            raise ProtocolError("a second Hello on one connection")
        self.client_id = hello.client_id
        self._listener.greeted(self)
        self.send(frame(encode(Welcome())))

    def connection_closed(self, why: str) -> None:
        if self.client_id:
            logger.info("stream of client %s disconnected: %s", self.client_id, why)
        self._server.abandon(self)

    def reply(self, request_id: str, reply: Accepted | RequestRefused) -> None:
        self.send(frame(encode(SubmitReply(request_id=request_id, reply=reply))))

    def deliver(self, deltas: list[TokenDelta]) -> list[str]:
        """Sends deltas, in one frame where they fit. Returns the ids of requests whose deltas could
        not be delivered; these must end."""
        payload = encode(Deltas(deltas=deltas))
        most = MAX_MESSAGE_BYTES
        if len(payload) > most:
            if len(deltas) > 1:
                half = len(deltas) // 2
                return self.deliver(deltas[:half]) + self.deliver(deltas[half:])
            most = min(MAX_DELTA_BYTES, self.room_bytes * 3 // 4)
        if len(payload) <= most:
            self.send(frame(payload, MAX_DELTA_BYTES))
            return []
        request_id = deltas[0].request_id
        logger.error(
            "request %s: ended, a delta of %d bytes is too large to send", request_id, len(payload)
        )
        failed = TokenDelta(request_id=request_id, token_ids=[], finish_reason="error")
        self.send(frame(encode(Deltas(deltas=[failed]))))
        return [request_id]

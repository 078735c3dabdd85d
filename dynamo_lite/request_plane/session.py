"""The clients of a worker, and their requests."""

import asyncio
import logging
from dataclasses import dataclass

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES, encode
from dynamo_lite.protocol.generate import (
    MAX_DELTA_BYTES,
    Deltas,
    TokenDelta,
    halves,
)
from dynamo_lite.request_plane.framing import FrameConnection, frame

logger = logging.getLogger(__name__)


class Session:
    """One client of the server, on its connection. Only GenerateServer changes it."""

    def __init__(self, client_id: str, connection: FrameConnection):
        self.client_id = client_id
        self.connection = connection

    def deliver(self, deltas: list[TokenDelta]) -> list[str]:
        """Sends deltas, in one frame where they fit. Returns the ids of requests whose deltas could
        not be delivered; these must end."""
        payload = encode(Deltas(deltas=deltas))
        if len(payload) <= MAX_MESSAGE_BYTES:
            self.connection.send(frame(payload))
            return []
        if len(deltas) > 1:
            half = len(deltas) // 2
            return self.deliver(deltas[:half]) + self.deliver(deltas[half:])
        fits = len(payload) <= min(MAX_DELTA_BYTES, self.connection.room_bytes * 3 // 4)
        if fits and (parts := halves(deltas[0])) is not None:
            # The second half is sent only if the first half could be sent.
            return self.deliver([parts[0]]) or self.deliver([parts[1]])
        request_id = deltas[0].request_id
        logger.error(
            "request %s: ended, a delta of %d bytes is too large to send", request_id, len(payload)
        )
        failed = TokenDelta(request_id=request_id, token_ids=[], finish_reason="error")
        self.connection.send(frame(encode(Deltas(deltas=[failed]))))
        return [request_id]


@dataclass(eq=False)
class SessionRequest:
    """A request of a session, from its arrival until the engine does not know it any more."""

    request_id: str
    session: Session
    #: Hands it to the engine, and returns why the engine has not accepted it; None when that is
    #: over.
    handover: asyncio.Task[Exception | None] | None = None
    #: Ends it after its timeout.
    timer: asyncio.TimerHandle | None = None
    #: No delta of it is sent any more.
    ended: bool = False

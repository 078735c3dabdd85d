"""The clients of a worker, and the requests of each."""

import asyncio
import logging
from collections.abc import Callable

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES, encode
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import (
    MAX_DELTA_BYTES,
    Deltas,
    GenerateRequest,
    TokenDelta,
    halves,
)
from dynamo_lite.request_plane.admission import Admission, Limits
from dynamo_lite.request_plane.framing import FrameConnection, frame

logger = logging.getLogger(__name__)

#: Upper limit of a request's timeout.
_LONGEST_TIMEOUT_S = 7 * 24 * 3600.0


class Session:
    """One client of the server, on its connection. Only GenerateServer changes it."""

    def __init__(self, client_id: str, connection: FrameConnection):
        self.client_id = client_id
        self.connection = connection
        #: Requests in flight.
        self.request_ids: set[str] = set()
        #: Tasks that hand requests of this session's connection to the engine, in the order of
        #: their start.
        self.handing_over: dict[asyncio.Task[Exception | None], None] = {}

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


class AdmittedRequests:
    """The requests in flight: their sessions, admission limits and timeouts.

    on_expiry: called with the id of a request after its timeout.
    """

    def __init__(self, limits: Limits, on_expiry: Callable[[str], None]):
        self.owners: dict[str, Session] = {}
        self.admission = Admission(limits)
        self._on_expiry = on_expiry
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def enter(self, session: Session, request: GenerateRequest) -> None:
        """Raises Refused when the request has timed out or would exceed a limit."""
        request_id, timeout_s = request.request_id, request.timeout_s
        if timeout_s is not None and not timeout_s > 0:
            raise Refused(f"request {request_id} has timed out", elsewhere=False)
        prompt_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        busy = self.admission.enter(request_id, prompt_tokens, promised=request.moved)
        if busy is not None:
            raise Refused(busy, elsewhere=True, busy=True)
        self.owners[request_id] = session
        session.request_ids.add(request_id)
        if timeout_s is not None:
            self._timers[request_id] = asyncio.get_running_loop().call_later(
                min(timeout_s, _LONGEST_TIMEOUT_S), self._on_expiry, request_id
            )

    def release(self, request_id: str) -> None:
        """Removes a request that has ended. Unknown ids are ignored."""
        session = self.owners.pop(request_id, None)
        if session is None:
            return
        session.request_ids.discard(request_id)
        self.admission.leave(request_id)
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

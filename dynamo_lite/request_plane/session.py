"""A worker's clients, and which request belongs to which of them."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from dynamo_lite.policy.admission import Admission, Busy, Limits
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta

#: A request that may take longer may run for this long.
_LONGEST_TIMEOUT_S = 7 * 24 * 3600.0


class DeltaSink(Protocol):
    """Where a session's deltas go."""

    def deliver(self, deltas: list[TokenDelta]) -> list[str]:
        """Returns the ids of requests that could not be delivered and must end."""
        ...

    def closed(self, request_ids: list[str], why: str) -> None:
        """The server ended the session while these requests ran."""
        ...


class Session:
    """One client of the server. Only GenerateServer changes it."""

    def __init__(self, client_id: str, outlet: DeltaSink):
        self.client_id = client_id
        self.outlet = outlet
        self.request_ids: set[str] = set()
        self.early_cancels: dict[str, None] = {}


class AdmittedRequests:
    """The requests that somebody waits for: their sessions, limits and timers.

    on_expiry: called with the id of a request whose time is up.
    """

    def __init__(self, limits: Limits, on_expiry: Callable[[str], None]):
        self.owners: dict[str, Session] = {}
        self.admission = Admission(limits)
        self._on_expiry = on_expiry
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def enter(self, session: Session, request: GenerateRequest) -> None:
        """Raises Refused for a request that comes too late, or beyond a limit."""
        request_id, timeout_s = request.request_id, request.timeout_s
        if timeout_s is not None and not timeout_s > 0:
            raise Refused(f"the time of request {request_id} is up", elsewhere=False)
        prompt_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        verdict = self.admission.enter(request_id, prompt_tokens, promised=request.moved)
        if isinstance(verdict, Busy):
            raise Refused(
                verdict.reason, elsewhere=True, busy=True, retry_after_s=verdict.retry_after_s
            )
        self.owners[request_id] = session
        session.request_ids.add(request_id)
        if timeout_s is not None:
            self._timers[request_id] = asyncio.get_running_loop().call_later(
                min(timeout_s, _LONGEST_TIMEOUT_S), self._on_expiry, request_id
            )

    def release(self, request_id: str) -> None:
        """Nobody waits for it any more. Unknown ids are ignored."""
        session = self.owners.pop(request_id, None)
        if session is None:
            return
        session.request_ids.discard(request_id)
        self.admission.leave(request_id)
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

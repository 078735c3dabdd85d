"""How a supervisor answers requests, and which orders it carries out."""

from collections.abc import Callable

from dynamo_lite.protocol.errors import Refused, UnknownWorker
from dynamo_lite.protocol.planner import (
    Counts,
    RoleCounts,
    SupervisorOrder,
    SupervisorReply,
    SupervisorRequest,
)

#: Of an error in a reply, in characters.
_ERROR_LIMIT = 1024


class Orders:
    """Lets each order through only once: by its version. counts: of a supervisor's processes."""

    def __init__(self, counts: Callable[[], dict[str, RoleCounts]]):
        self._counts = counts
        #: The highest of any order so far; 0 before the first.
        self.version = 0

    def answer(
        self, request: SupervisorRequest, carry_out: Callable[[SupervisorOrder], object]
    ) -> SupervisorReply:
        """carry_out: raises Refused when an order is not possible."""
        if isinstance(request, Counts):
            return self._reply()
        if request.version <= self.version:
            why = f"version {request.version} is old: an order needs one above {self.version}"
            return self._reply(why, stale=True)
        # Also that of a refused order: the same order must not succeed later.
        self.version = request.version
        try:
            carry_out(request)
        except Refused as exc:
            return self._reply(exc.reason, unknown=isinstance(exc, UnknownWorker))
        return self._reply()

    def refusal(self, why: str) -> SupervisorReply:
        """The reply to what is not a request."""
        return self._reply(why)

    def _reply(
        self, error: str = "", *, stale: bool = False, unknown: bool = False
    ) -> SupervisorReply:
        return SupervisorReply(
            ok=not error,
            error=error[:_ERROR_LIMIT],
            stale=stale,
            unknown=unknown,
            counts=self._counts(),
            version=self.version,
        )

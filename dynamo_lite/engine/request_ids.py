"""An engine's own names for its requests.

A caller's id may come again while the engine still holds blocks of the request
that had it before: one that was aborted while its KV was on the way. An engine
that meets an id twice breaks, so it gets names that nobody else can choose.
"""

from collections.abc import Iterable


class RequestIds:
    """Callers' ids to the engine's own, for the requests that run."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        self._count = 0

    def enter(self, request_id: str) -> str:
        """A new request of this id; returns its own name."""
        self._count += 1
        own = self._own[request_id] = f"{request_id}#{self._count}"
        return own

    def leave(self, request_ids: Iterable[str]) -> list[str]:
        """These are aborted. Returns the own names of those that ran."""
        found = (self._own.pop(request_id, None) for request_id in request_ids)
        return [own for own in found if own is not None]

    def caller(self, own: str, *, ended: bool) -> str | None:
        """Whose output this is; None when its request was aborted. ended: it is the last one."""
        request_id = own.rpartition("#")[0]
        if self._own.get(request_id) != own:
            return None
        if ended:
            del self._own[request_id]
        return request_id

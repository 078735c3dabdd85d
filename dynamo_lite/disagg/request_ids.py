"""An engine's own names for its requests.

A caller's id may be used again while the engine still holds blocks of its earlier request: one that
was aborted while its KV was in flight. An engine fails when it sees an id twice, so it gets unique
names.
"""

from collections.abc import Iterable


class RequestIds:
    """Maps callers' ids to the engine's own names, for the requests that run."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        self._count = 0

    def enter(self, request_id: str) -> str:
        """Registers a new request; returns its own name."""
        self._count += 1
        own = self._own[request_id] = f"{request_id}#{self._count}"
        return own

    def leave(self, request_ids: Iterable[str]) -> list[str]:
        """Removes requests. Returns the own names of those that ran."""
        found = (self._own.pop(request_id, None) for request_id in request_ids)
        return [own for own in found if own is not None]

    def running(self, own: str) -> str | None:
        """The caller's id of a request that runs; None for other names."""
        request_id = own.rpartition("#")[0]
        return request_id if self._own.get(request_id) == own else None

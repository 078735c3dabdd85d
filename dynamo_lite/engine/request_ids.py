"""An engine's own names for its requests.

A caller's id may come again while the engine still holds blocks of the request
that had it before: one that was aborted while its KV was on the way. An engine
that meets an id twice breaks, so it gets names that nobody else can choose.
"""

import re
from collections.abc import Iterable

#: What others put around a client's id: the number of a sibling (`n` > 1) before it; the
#: number of its prompt and eight random digits behind; which of its workers it is at.
_SIBLING = re.compile(r"\d+_")
_BEHIND = re.compile(r"(-\d+)?(-[0-9a-f]{8})?")


def is_of(own: str, asked: str) -> bool:
    """Whether an engine's name of a request belongs to the request that a client, or
    somebody on the way, calls `asked`."""
    name = own.rpartition("#")[0] or own
    for text in (own, name, name.partition("~")[0]):
        for start in (text, _SIBLING.sub("", text, count=1)):
            behind = start.removeprefix(asked)
            if start.startswith(asked) and _BEHIND.fullmatch(behind):
                return True
    return False


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

"""The beginning of a stream, up to its first output.

vLLM's chats, responses and messages begin with events that contain nothing of the answer yet, and
an engine that could not load the KV says so after them. As long as the client has not got them,
another engine can be asked.
"""

import re
from typing import Any, cast

import msgspec

from dynamo_lite.forward.event_cutter import EventCutter, split
from dynamo_lite.forward.events import error_of, payload_of

#: What is held back at most. An event may contain the prompt's tokens.
LIMIT_BYTES = 1 << 20

#: Types of events before the first output.
_TYPES = frozenset({"response.created", "response.in_progress", "message_start"})
#: One of these is in each event without output, so that no other event is parsed.
_MARKS = (b'"role"', b'"response.created"', b'"response.in_progress"', b'"message_start"')
#: JSON contains no raw CR, so it is a line end.
_LONE_CR = re.compile(rb"\r[^\n]")


class Beginning:
    """Holds the first events of a stream back."""

    def __init__(self) -> None:
        self.data = b""
        #: The JSON of the event that came in place of the first output, if it is an error.
        self.error: bytes | None = None
        self._cutter = EventCutter()

    def over(self, data: bytes) -> bool:
        """Takes the next bytes. Returns whether the first output, or an error, is among them."""
        self.data += data
        # No event of an engine that ends its lines with a lone CR would ever be found.
        if (b"\r" in data and _LONE_CR.search(self.data)) or len(self.data) > LIMIT_BYTES:
            return True
        for event in split(self._cutter.feed(data)):
            if not event:
                continue
            if (error := error_of(event)) is not None:
                self.error = error
                return True
            if not _says_nothing(event, payload_of(event)):
                return True
        return False


class _Event(msgspec.Struct):
    type: str = ""
    choices: list[dict[str, Any]] = []


def _says_nothing(event: bytes, payload: bytes) -> bool:
    """Whether it is known to come before the first output."""
    if not any(mark in event for mark in _MARKS):
        return False
    try:
        found = msgspec.json.decode(payload, type=_Event)
    except msgspec.DecodeError:
        return False
    return found.type in _TYPES or (bool(found.choices) and all(map(_has_role_only, found.choices)))


def _has_role_only(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict) or "role" not in delta:
        return False
    rest = {**choice, **cast("dict[str, Any]", delta)}
    return not any(value for key, value in rest.items() if key not in ("index", "delta", "role"))

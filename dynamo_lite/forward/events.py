"""The server-sent events of an engine's stream: where they end, errors among them, and those before
the first output.

An event ends at a blank line. Lines end with LF or CRLF. Of the standard's three line ends, a lone
CR is not known here: no engine is known that sends it.
"""

import re
from contextlib import suppress
from typing import Any, cast

import msgspec

from dynamo_lite.forward.client import Answer
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.failures import Final, LegFailed, check_size, refused

#: More of the beginning of a stream is not held back. An event may contain the prompt's tokens.
LIMIT_BYTES = 1 << 20

EVENT_ENDS = _LF_END, _CRLF_END = b"\n\n", b"\n\r\n"
_BLANK_LINE = re.compile(rb"\n\r?\n")
#: SGLang writes errors as Python does.
_ERRORS = (b'{"error"', b"{'error'")
_ERROR_TYPE = (b"event: error\n", b"event: error\r\n")
#: Types of events before the first output.
_TYPES = frozenset({"response.created", "response.in_progress", "message_start"})
#: One of these is in each event without output, so that no other event is parsed.
_MARKS = (b'"role"', b'"response.created"', b'"response.in_progress"', b'"message_start"')


class EventReader:
    """Reads an answer by whole events. No byte is changed."""

    def __init__(self, response: EngineAnswer):
        self._response = response
        #: An incomplete event.
        self._held = bytearray()

    async def next(self) -> bytes:
        """The whole events that have come; what is left, at the end; then nothing. Raises
        LegFailed."""
        response = self._response
        while data := await response.read_some():
            if events := self._cut(data):
                return events
            check_size(len(self._held), response.engine, response.leg)
        return self.rest()

    def rest(self) -> bytes:
        """What has come of an incomplete event."""
        data = bytes(self._held)
        self._held.clear()
        return data

    def _cut(self, data: bytes) -> bytes:
        # A blank line may come in pieces. What was held has none.
        start = max(0, len(self._held) - len(_LF_END))
        self._held += data
        lf, crlf = self._held.rfind(_LF_END, start), self._held.rfind(_CRLF_END, start)
        end = crlf + len(_CRLF_END) if crlf > lf else lf + len(_LF_END) if lf >= 0 else 0
        events = bytes(self._held[:end])
        del self._held[:end]
        return events

    async def until_output(self) -> bytes:
        """The events up to the first output.

        vLLM's chats, responses and messages begin with events that contain nothing of the answer
        yet, and an engine that could not load the KV says so after them. As long as the client has
        not got them, another engine can be asked. Raises LegFailed, Final.
        """
        held = b""
        while len(held) <= LIMIT_BYTES and (events := await self.next()):
            held += events
            for event in filter(None, split(events)):
                if (error := error_of(event)) is not None:
                    raise failure(self._response, error)
                if not _says_nothing(event, payload_of(event)):
                    return held
        return held


def split(events: bytes) -> list[bytes]:
    """The single events, without their ends. Lines inside them keep theirs."""
    return _BLANK_LINE.split(events)


async def without_error(response: EngineAnswer) -> bytes:
    """A whole stream. Raises LegFailed, and Final, also for an error in it."""
    reader, found = EventReader(response), b""
    while events := await reader.next():
        for event in split(events):
            if (error := error_of(event)) is not None:
                raise failure(response, error)
        found += events
        check_size(len(found), response.engine, response.leg)
    return found


def payload_of(event: bytes) -> bytes:
    """The JSON of an event; empty without any."""
    lines = event.split(b"\n")
    return next((line[5:].strip() for line in lines if line.startswith(b"data:")), b"")


def error_of(event: bytes) -> bytes | None:
    """The JSON of an event that is an error; None for any other event."""
    payload = payload_of(event)
    if event.startswith(_ERROR_TYPE) or payload.startswith(_ERRORS):
        return payload
    return None


def failure(response: EngineAnswer, error: bytes) -> LegFailed | Final:
    """What an error in place of output means. A status below 500 says that the request is wrong,
    not the engine."""
    code: Any = None
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        code = msgspec.json.decode(error)["error"]["code"]
    answer = None
    if isinstance(code, int) and 400 <= code < 600:
        answer = Answer(code, {"content-type": "application/json"}, error)
    if answer is not None and answer.status < 500:
        return refused(response.engine, response.leg, answer)
    return LegFailed(response.engine, response.leg, "status", answer=answer)


class _Event(msgspec.Struct):
    type: str = ""
    choices: list[dict[str, Any]] = []


def _says_nothing(event: bytes, payload: bytes) -> bool:
    """Whether it is known to come before the first output. What has no data is a comment, such as
    a sign of life during a long prefill."""
    if not payload:
        return True
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

"""The server-sent events of an engine's stream: where they end, errors among them, and those before
the first output.

An event ends at a blank line. Lines end with LF or CRLF. Of the standard's three line ends, a lone
CR is not known here: no engine is known that sends it.
"""

import re
from typing import Any, cast

import msgspec

from dynamo_lite.forward.client import Answer
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.failures import Final, LegFailed, check_size, refused

#: What is held back at most of the beginning of a stream. An event may contain the prompt's tokens.
LIMIT_BYTES = 1 << 20

_LF_END, _CRLF_END = b"\n\n", b"\n\r\n"
_BLANK_LINE = re.compile(rb"\n\r?\n")
#: SGLang writes errors as Python does.
_ERRORS = (b'{"error"', b"{'error'")
_ERROR_TYPE = (b"event: error\n", b"event: error\r\n")
#: Types of events before the first output.
_TYPES = frozenset({"response.created", "response.in_progress", "message_start"})
#: One of these is in each event without output, so that no other event is parsed.
_MARKS = (b'"role"', b'"response.created"', b'"response.in_progress"', b'"message_start"')


class EventCutter:
    """Cuts a stream of server-sent events at their ends. No byte is changed."""

    def __init__(self) -> None:
        #: An incomplete event.
        self.held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """The whole events so far; an incomplete one is kept."""
        # A blank line may come in pieces. What was kept has none.
        start = max(0, len(self.held) - len(_LF_END))
        self.held += data
        lf, crlf = self.held.rfind(_LF_END, start), self.held.rfind(_CRLF_END, start)
        end = crlf + len(_CRLF_END) if crlf > lf else lf + len(_LF_END) if lf >= 0 else 0
        events = bytes(self.held[:end])
        del self.held[:end]
        return events

    def flush(self) -> bytes:
        """What is left at the end of the stream."""
        data = bytes(self.held)
        self.held.clear()
        return data


def split(events: bytes) -> list[bytes]:
    """The single events, without their ends. Lines inside them keep theirs."""
    return _BLANK_LINE.split(events)


def ends_event(data: bytes) -> bool:
    """Whether the end of these bytes is the end of an event."""
    return data.endswith((_LF_END, _CRLF_END))


class EventReader:
    """Reads whole events of an answer. begun: bytes of it that were read before."""

    def __init__(self, response: EngineAnswer, begun: bytes = b""):
        self._response, self._begun = response, begun
        self._cutter = EventCutter()

    async def next(self) -> bytes:
        """Empty at the end. Raises LegFailed."""
        response, cutter = self._response, self._cutter
        while data := self._begun or await response.read_some():
            self._begun = b""
            if events := cutter.feed(data):
                return events
            check_size(len(cutter.held), response.engine, response.leg)
        return cutter.flush()


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
    answer = _as_answer(error)
    if answer is not None and answer.status < 500:
        return refused(response.engine, response.leg, answer)
    return LegFailed(response.engine, response.leg, "event", answer=answer)


def _as_answer(error: bytes) -> Answer | None:
    """With its status, if it has one."""
    try:
        code = msgspec.json.decode(error)["error"]["code"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(code, int) or not 400 <= code < 600:
        return None
    return Answer(code, {"content-type": "application/json"}, error)


async def until_output(response: EngineAnswer) -> bytes:
    """The first bytes of an answer, in a stream up to its first output.

    vLLM's chats, responses and messages begin with events that contain nothing of the answer yet,
    and an engine that could not load the KV says so after them. As long as the client has not got
    them, another engine can be asked. Raises LegFailed, Final.
    """
    held = data = await response.read_some()
    if not response.is_stream:
        return data
    cutter = EventCutter()
    while data and len(held) <= LIMIT_BYTES:
        for event in filter(None, split(cutter.feed(data))):
            if (error := error_of(event)) is not None:
                raise failure(response, error)
            if not _says_nothing(event, payload_of(event)):
                return held
        data = await response.read_some()
        held += data
    return held


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

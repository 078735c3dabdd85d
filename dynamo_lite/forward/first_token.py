"""Joins two streams: the first token of each choice comes from the prefill engine, all others from
the decode engine, which generates the first one again.

Pure: whole events in, whole events out. Corner cases:

- The first chunk of a chat is the role, not a token. The prefill engine's is shown; the decode
  engine's is dropped.
- A choice whose first token ends it (end of sequence, or a limit of one token) ends with the
  prefill engine's finish reason. Everything of it from the decode engine is dropped.
- A decode engine's first chunk may contain more than the first token, and a first token may show
  nothing. So the text is compared (`shown_delta.py`): what goes beyond the prefill engine's is
  shown, and where the first tokens differ, what goes beyond the decode engine's own.
- Usage is the decode engine's, which counts all tokens. Only its cached tokens are the prefill
  engine's.
- Errors of either engine are shown as they are.
- Tokens of another form than engines give them raise MalformedEvent.
"""

from typing import Any

import msgspec

from dynamo_lite.forward.protocols.one_token import plain
from dynamo_lite.forward.rewriting import Changes
from dynamo_lite.forward.shown_delta import ShownDelta, has_token
from dynamo_lite.forward.usage import cached_tokens

_DONE = b"[DONE]"


class MalformedEvent(ValueError):
    """The tokens of an event cannot be read."""


# What is read of an event's choices: everything else in them may have any form.


class _Function(msgspec.Struct):
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int | None = None
    text: str | None = None
    delta: _Delta | None = None


class FirstTokenMerge:
    """limit: the client's limit on tokens; None without one."""

    def __init__(self, limit: int | None):
        self._one_token = limit == 1
        #: What the prefill engine has shown, by choice.
        self._shown: dict[int, ShownDelta] = {}
        self._ended: set[int] = set()
        #: Choices of which the decode engine has repeated it.
        self._repeated: set[int] = set()
        self._held: list[bytes] = []
        self._id: msgspec.Raw | None = None
        #: The decode engine's id and the prefill engine's, where they differ.
        self._ids: tuple[bytes, bytes] | None = None
        self._cached: int | None = None

    @property
    def begun(self) -> bool:
        """Whether the prefill engine has sent a token of any choice."""
        return bool(self._shown)

    @property
    def over(self) -> bool:
        """Whether every choice has ended with its first token. Ask after the prefill leg."""
        return bool(self._shown) and self._ended >= self._shown.keys()

    def from_prefill(self, events: bytes) -> bytes:
        return b"".join(self._prefill_event(payload) for payload in _payloads(events))

    def end(self) -> bytes:
        """The end of the prefill engine's stream, for a request that is `over`."""
        return b"".join(map(_event, [*self._held, _DONE]))

    def from_decode(self, events: bytes) -> bytes:
        if self._ended or self._repeated < self._shown.keys():
            events = b"".join(self._decode_event(payload) for payload in _payloads(events))
        elif self._ids is not None:
            events = events.replace(*self._ids)
        return Changes(cached_tokens=self._cached).events(events)

    def _prefill_event(self, payload: bytes) -> bytes:
        if payload == _DONE:
            return b""
        event = _decoded(payload)
        if event is None or "choices" not in event:
            return _event(payload)
        if self._id is None and "id" in event:
            self._id = event["id"]
        choices = _choices(event)
        if (cached := _cached_tokens(event)) is not None:
            self._cached = cached
        if not choices:
            self._held.append(payload)  # its usage counts one token
            return b""
        for choice in choices:
            self._first_token(choice)
        event["choices"] = choices
        event.pop("usage", None)
        return _event(msgspec.json.encode(event))

    def _first_token(self, choice: dict[str, Any]) -> None:
        """Notes a choice of the prefill engine; a finish that is only due to its limit of one token
        is removed."""
        index = choice.get("index", 0)
        reason = choice.get("finish_reason")
        if not (has_token(choice) or reason is not None):
            return
        self._shown.setdefault(index, ShownDelta()).add(choice)
        if reason is None:
            return
        if reason == "length" and not self._one_token:
            choice["finish_reason"] = None
            if choice.get("stop_reason") is not None:
                choice["stop_reason"] = None
        else:
            self._ended.add(index)

    def _decode_event(self, payload: bytes) -> bytes:
        event = None if payload == _DONE else _decoded(payload)
        if event is None or "choices" not in event:
            return _event(payload)
        choices = _choices(event)
        if self._id is not None and (other := event.get("id", self._id)) != self._id:
            self._ids = (bytes(other), bytes(self._id))
            event["id"] = self._id
        if choices:
            shown = [choice for choice in choices if self._beyond(choice)]
            if not shown:
                return b""
            event["choices"] = shown
        return _event(msgspec.json.encode(event))

    def _beyond(self, choice: dict[str, Any]) -> bool:
        """Removes the part of the decode engine's chunk that was shown already. Returns whether
        anything is left."""
        index = choice.get("index", 0)
        if index in self._ended:
            return False
        if index in self._repeated:
            return True
        ends = choice.get("finish_reason") is not None
        if not has_token(choice):
            return ends
        shown = self._shown.setdefault(index, ShownDelta())
        left = shown.take_out(choice)
        if left or ends or shown.repeated:
            self._repeated.add(index)
        return left or ends


def _payloads(events: bytes) -> list[bytes]:
    return [line[5:].strip() for line in events.split(b"\n") if line.startswith(b"data:")]


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def _decoded(payload: bytes) -> dict[str, Any] | None:
    """Raises MalformedEvent."""
    try:
        return msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None
    except (ValueError, RecursionError) as exc:
        raise MalformedEvent(type(exc).__name__) from exc


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises MalformedEvent."""
    try:
        choices = plain(event["choices"])
        msgspec.convert(choices, list[_Choice] | None)
    except (ValueError, RecursionError) as exc:
        raise MalformedEvent(type(exc).__name__) from exc
    return choices or []


def _cached_tokens(event: dict[str, Any]) -> int | None:
    """Raises MalformedEvent."""
    try:
        return cached_tokens(plain(event.get("usage")))
    except (ValueError, RecursionError) as exc:
        raise MalformedEvent(type(exc).__name__) from exc

"""Joins two streams: the first token of each choice comes from the prefill engine, all others from
the decode engine, which generates the first one again.

Pure: whole events in, whole events out. Corner cases:

- The first chunk of a chat is the role, not a token. The prefill engine's is shown; the decode
  engine's is dropped.
- A choice whose first token ends it (end of sequence, or a limit of one token) ends with the
  prefill engine's finish reason. Everything of it from the decode engine is dropped.
- A decode engine's first chunk may contain more than the first token, and a first token may show
  nothing yet (the start of a thought or of a tool call, a part of a character). An engine may hold
  text back that could be the beginning of a stop string. So the text is compared, not numbers of
  tokens: what goes beyond the prefill engine's is shown, and where the first tokens differ, what
  goes beyond the decode engine's own.
- Usage is the decode engine's, which counts all tokens. Only its cached tokens are the prefill
  engine's.
- Errors of either engine are shown as they are.
- Tokens of another form than engines give them raise MalformedEvent.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from dynamo_lite.forward.protocols.one_token import plain
from dynamo_lite.forward.rewriting import Changes, cached_tokens

_Json = dict[str, Any]

#: Fields of a delta with text.
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_FIRST_WORD = re.compile(r"\s*\S+")
#: What shows a part of a character. The decode engine shows the whole character later.
_REPLACEMENT = "\ufffd"
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
        self._shown: dict[int, _ShownDelta] = {}
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
        """Raises MalformedEvent, as `from_decode`."""
        return _each(events, self._prefill_event)

    def end(self) -> bytes:
        """The end of the prefill engine's stream, for a request that is `over`."""
        return b"".join(map(_event, [*self._held, _DONE]))

    def from_decode(self, events: bytes) -> bytes:
        if self._ended or self._repeated < self._shown.keys():
            events = _each(events, self._decode_event)
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
        if (cached := cached_tokens(plain(event.get("usage")))) is not None:
            self._cached = cached
        if not choices:
            self._held.append(payload)  # its usage counts one token
            return b""
        for choice in choices:
            self._first_token(choice)
        event["choices"] = choices
        event.pop("usage", None)
        return _event(msgspec.json.encode(event))

    def _first_token(self, choice: _Json) -> None:
        """Notes a choice of the prefill engine; a finish that is only due to its limit of one token
        is removed."""
        index = choice.get("index", 0)
        reason = choice.get("finish_reason")
        if not (_has_token(choice) or reason is not None):
            return
        self._shown.setdefault(index, _ShownDelta()).add(choice)
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

    def _beyond(self, choice: _Json) -> bool:
        """Removes the part of the decode engine's chunk that was shown already. Returns whether
        anything is left."""
        index = choice.get("index", 0)
        if index in self._ended:
            return False
        if index in self._repeated:
            return True
        ends = choice.get("finish_reason") is not None
        if not _has_token(choice):
            return ends
        shown = self._shown.setdefault(index, _ShownDelta())
        left = shown.take_out(choice)
        if left or ends or shown.repeated:
            self._repeated.add(index)
        return left or ends


def _each(events: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Raises MalformedEvent."""
    lines = (line for line in events.split(b"\n") if line.startswith(b"data:"))
    try:
        return b"".join(change(line[5:].strip()) for line in lines)
    except (ValueError, RecursionError) as exc:
        raise MalformedEvent(type(exc).__name__) from exc


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def _decoded(payload: bytes) -> _Json | None:
    try:
        return msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None


def _choices(event: _Json) -> list[_Json]:
    """Raises ValueError, RecursionError."""
    choices = plain(event["choices"])
    msgspec.convert(choices, list[_Choice] | None)
    return choices or []


def _has_token(choice: _Json) -> bool:
    """A chat's first chunk has a role, and empty content."""
    if "text" in choice:
        return True
    delta = choice.get("delta") or {}
    fields = (*_TEXTS, "tool_calls")
    if delta.get("role") is not None and not any(delta.get(key) for key in fields):
        return False
    return any(delta.get(key) is not None for key in fields)


class _ShownDelta:
    """What the prefill engine has shown of one choice, and the decode engine has not repeated: by
    field of its text; by index, the arguments of a tool call."""

    def __init__(self) -> None:
        self._left: dict[str | int, str] = {}
        #: Those of which the decode engine has repeated a part.
        self._begun: set[str | int] = set()

    @property
    def repeated(self) -> bool:
        """Whether the decode engine has repeated everything."""
        return not any(left or isinstance(key, int) for key, left in self._left.items())

    def add(self, choice: _Json) -> None:
        """A chunk of the prefill engine."""
        calls = {call.get("index", 0): _arguments(call) for call in _calls(choice)}
        for key, text in {**_texts(choice), **calls}.items():
            self._left[key] = self._left.get(key, "") + text

    def take_out(self, choice: _Json) -> bool:
        """Removes from a chunk of the decode engine what it repeats. Returns whether any text or
        tool call is left. Of text that differs from the prefill engine's, the first token is
        removed: it is the decode engine's own first one."""
        first = _first_token(choice)
        owner = _owner(choice)
        owner.pop("role", None)
        texts = {key: self._rest(key, text, first) for key, text in _texts(choice).items()}
        for key, rest in texts.items():
            if rest or owner is choice:
                owner[key] = rest
            else:
                del owner[key]
        calls = _calls(choice)
        kept = [call for call in calls if self._take_out_call(call)]
        if kept:
            owner["tool_calls"] = kept
        elif calls:
            del owner["tool_calls"]
        return bool(kept) or any(texts.values())

    def _take_out_call(self, call: _Json) -> bool:
        """The client has the prefill engine's id and name of this call."""
        index = call.get("index", 0)
        if index not in self._left:
            return True
        rest = self._rest(index, _arguments(call))
        if not self._left[index]:
            del self._left[index]
        for key in ("id", "type"):
            call.pop(key, None)
        call["function"] = {"arguments": rest}
        return bool(rest)

    def _rest(self, key: str | int, text: str, first: str = "") -> str:
        """What of the decode engine's next text was not shown. first: its first token, if that is
        known."""
        shown, self._left[key] = self._left.get(key, ""), ""
        if not text.startswith(shown) and shown.startswith(text):
            self._left[key] = shown[len(text) :]
            if text:
                self._begun.add(key)
            return ""
        for known in (shown, shown.rstrip(_REPLACEMENT)):
            if text.startswith(known):
                return text[len(known) :]
        return text if key in self._begun else text[_length_of_first(text, first) :]


def _length_of_first(text: str, token: str = "") -> int:
    """Of the first token of a text. token: what the chunk says it is. Without it, no more than the
    first word is taken for it: few tokens go on after a space."""
    if token and text.startswith(token):
        return len(token)
    found = _FIRST_WORD.match(text)
    return len(text) if found is None else found.end()


def _first_token(choice: _Json) -> str:
    """The text of its first token, from its log probabilities; empty without them."""
    logprobs: Any = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return ""
    tokens: Any = logprobs.get("tokens") or logprobs.get("content")  # completions; chats
    first: Any = tokens[0] if isinstance(tokens, list) and tokens else ""
    token: Any = first.get("token") if isinstance(first, dict) else first
    return token if isinstance(token, str) else ""


def _owner(choice: _Json) -> _Json:
    """Where a chunk has its text. A delta is copied, because it may be null."""
    if "text" not in choice:
        choice["delta"] = dict(choice.get("delta") or {})
        return choice["delta"]
    return choice


def _texts(choice: _Json) -> dict[str, str]:
    if "text" in choice:
        return {"text": choice["text"] or ""}
    delta = choice.get("delta") or {}
    return {key: delta[key] for key in _TEXTS if isinstance(delta.get(key), str)}


def _calls(choice: _Json) -> list[_Json]:
    return (choice.get("delta") or {}).get("tool_calls") or []


def _arguments(call: _Json) -> str:
    return (call.get("function") or {}).get("arguments") or ""

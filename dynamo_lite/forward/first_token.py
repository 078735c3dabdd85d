"""Joins two streams: the first token of each choice comes from the prefill engine, all others from
the decode engine, which generates the first one again.

Pure: whole events in, whole events out. Corner cases:

- The first chunk of a chat is the role, not a token. The prefill engine's is shown; the decode
  engine's is dropped.
- The end of a choice, its finish reason, and usage are the decode engine's.
- A decode engine's first chunk may contain more than the first token, and a first token may show
  nothing yet (the start of a thought, a part of a character). An engine may hold text back that
  could be the beginning of a stop string. So the text is compared, not numbers of tokens: what goes
  beyond the prefill engine's is shown. Where the first tokens differ, the first word of the decode
  engine's text is taken for its own first token and removed: few tokens go on after a space.
- Errors of either engine are shown as they are.
- Tokens of another form than engines give them raise MalformedEvent.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from dynamo_lite.forward.protocols.one_token import plain

_Json = dict[str, Any]

#: Fields of a delta with text.
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_FIRST_WORD = re.compile(r"\s*\S+")
#: What shows a part of a character. The decode engine shows the whole character later.
_REPLACEMENT = "\ufffd"
_DONE = b"[DONE]"


class MalformedEvent(ValueError):
    """The tokens of an event cannot be read."""


class _Choice(msgspec.Struct):
    """What is read of an event's choices: everything else in them may have any form."""

    index: int | None = None
    text: str | None = None
    delta: dict[str, Any] | None = None


class FirstTokenMerge:
    def __init__(self) -> None:
        #: What the prefill engine has shown and the decode engine has not repeated, by choice and
        #: field; without the choices that go beyond it.
        self._shown: dict[int, dict[str, str]] = {}

    @property
    def begun(self) -> bool:
        """Whether the prefill engine has sent a token of any choice."""
        return bool(self._shown)

    def from_prefill(self, events: bytes) -> bytes:
        """Raises MalformedEvent, as `from_decode`."""
        return _each(events, self._prefill_event)

    def from_decode(self, events: bytes) -> bytes:
        return _each(events, self._decode_event) if self._shown else events

    def _prefill_event(self, payload: bytes) -> bytes:
        if (found := _decoded(payload)) is None:
            return b"" if payload == _DONE else _event(payload)
        event, choices = found
        if not choices:
            return b""  # its usage counts one token
        for choice in choices:
            self._first_token(choice)
        event["choices"] = choices
        event.pop("usage", None)
        return _event(msgspec.json.encode(event))

    def _first_token(self, choice: _Json) -> None:
        """Notes a choice of the prefill engine. Its end is only due to its limit of one token."""
        ended = choice.get("finish_reason") is not None
        texts = _texts(choice)
        if ended or _has_token(choice, texts):
            shown = self._shown.setdefault(_index(choice), {})
            for key, text in texts.items():
                shown[key] = shown.get(key, "") + text
        for key in ("finish_reason", "stop_reason"):
            if choice.get(key) is not None:
                choice[key] = None

    def _decode_event(self, payload: bytes) -> bytes:
        if (found := _decoded(payload)) is None or not found[1]:
            return _event(payload)
        event, choices = found
        event["choices"] = [choice for choice in choices if self._beyond(choice)]
        return _event(msgspec.json.encode(event)) if event["choices"] else b""

    def _beyond(self, choice: _Json) -> bool:
        """Removes the part of the decode engine's chunk that was shown already. Returns whether
        anything is left."""
        index, texts = _index(choice), _texts(choice)
        shown = self._shown.get(index)
        if shown is None:
            return True
        ends = choice.get("finish_reason") is not None
        if not _has_token(choice, texts):
            return ends
        rests = {key: _rest(shown, key, text) for key, text in texts.items()}
        owner = choice
        if "text" not in choice:
            owner = choice["delta"] = {k: v for k, v in choice["delta"].items() if k != "role"}
        for key, rest in rests.items():
            if rest or owner is choice:
                owner[key] = rest
            else:
                del owner[key]
        left = any(rests.values())
        if not left:
            choice.pop("logprobs", None)  # of tokens that were shown
        if left or ends or not any(shown.values()):
            del self._shown[index]
        return left or ends


def _rest(shown: dict[str, str], key: str, text: str) -> str:
    """What of the decode engine's next text was not shown; the rest of that is left in `shown`."""
    known, shown[key] = shown.get(key, ""), ""
    if known.startswith(text) and text != known:
        shown[key] = known[len(text) :]
        return ""
    for one in (known, known.rstrip(_REPLACEMENT)):
        if text.startswith(one):
            return text[len(one) :]
    first = _FIRST_WORD.match(text)
    return "" if first is None else text[first.end() :]


def _each(events: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Raises MalformedEvent."""
    lines = (line for line in events.split(b"\n") if line.startswith(b"data:"))
    try:
        return b"".join(change(line[5:].strip()) for line in lines)
    except (ValueError, RecursionError) as exc:
        raise MalformedEvent(type(exc).__name__) from exc


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def _decoded(payload: bytes) -> tuple[_Json, list[_Json]] | None:
    """An event and its choices; None if it has none. Raises ValueError, RecursionError."""
    if payload == _DONE:
        return None
    try:
        event: _Json = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None
    if "choices" not in event:
        return None
    choices = plain(event["choices"])
    msgspec.convert(choices, list[_Choice] | None)
    return event, choices or []


def _has_token(choice: _Json, texts: dict[str, str]) -> bool:
    """A chat's first chunk has a role, and empty content."""
    role = (choice.get("delta") or {}).get("role") is not None
    return any(texts.values()) if role else bool(texts)


def _index(choice: _Json) -> int:
    return choice.get("index") or 0


def _texts(choice: _Json) -> dict[str, str]:
    if "text" in choice:
        return {"text": choice["text"] or ""}
    delta = choice.get("delta") or {}
    return {key: delta[key] for key in _TEXTS if isinstance(delta.get(key), str)}

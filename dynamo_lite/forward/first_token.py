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
- Tokens of another form than engines give them raise ValueError, or RecursionError.
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


class _Choice(msgspec.Struct):
    """What is read of an event's choices: everything else in them may have any form."""

    index: int | None = None
    text: str | None = None
    delta: dict[str, Any] | None = None


class FirstTokenMerge:
    def __init__(self) -> None:
        #: Whether the prefill engine has ended a choice, as after its one token.
        self.begun = False
        #: What the prefill engine has shown and the decode engine has not repeated, by choice and
        #: field; without the choices that go beyond it.
        self._shown: dict[int, dict[str, str]] = {}

    def from_prefill(self, events: bytes) -> bytes:
        return _each(events, self._first, ends=False)

    def from_decode(self, events: bytes) -> bytes:
        return _each(events, self._next, ends=True) if self._shown else events

    def _first(self, event: _Json) -> bool:
        """Notes the texts. Ends are only due to the limit of one token, which usage counts."""
        event.pop("usage", None)
        for choice in event["choices"]:
            self.begun = self.begun or choice.get("finish_reason") is not None
            shown = self._shown.setdefault(choice.get("index") or 0, {})
            for key, text in _texts(choice).items():
                shown[key] = shown.get(key, "") + text
            for key in {"finish_reason", "stop_reason"} & choice.keys():
                choice[key] = None
        return bool(event["choices"])

    def _next(self, event: _Json) -> bool:
        if not event["choices"]:
            return True
        event["choices"] = [choice for choice in event["choices"] if self._goes_beyond(choice)]
        return bool(event["choices"])

    def _goes_beyond(self, choice: _Json) -> bool:
        """Removes the part of the decode engine's chunk that was shown already. Returns whether
        anything is left."""
        index = choice.get("index") or 0
        if (shown := self._shown.get(index)) is None:
            return True
        if (choice.get("delta") or {}).get("role") is not None and not any(_texts(choice).values()):
            return choice.get("finish_reason") is not None  # a chat's first chunk: no token yet
        rests = {key: _rest(shown, key, text) for key, text in _texts(choice).items()}
        left, ends = any(rests.values()), choice.get("finish_reason") is not None
        if "text" in choice:
            choice |= rests
        else:
            others = {
                k: v for k, v in (choice.get("delta") or {}).items() if k not in ("role", *rests)
            }
            choice["delta"] = others | {key: rest for key, rest in rests.items() if rest}
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


def _each(events: bytes, change: Callable[[_Json], bool], *, ends: bool) -> bytes:
    """change: returns whether an event with choices is shown. ends: whether the mark of the end
    is. All others are."""
    shown = b""
    for line in events.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        event, shows = _decoded(payload), ends or payload != _DONE
        if event is not None:
            shows = change(event)
            payload = msgspec.json.encode(event)
        if shows:
            shown += b"data: " + payload + b"\n\n"
    return shown


def _decoded(payload: bytes) -> _Json | None:
    """An event with its choices; None if it has none."""
    try:
        event: _Json = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None
    if "choices" not in event:
        return None
    event["choices"] = plain(event["choices"]) or []
    msgspec.convert(event["choices"], list[_Choice])
    return event


def _texts(choice: _Json) -> dict[str, str]:
    if "text" in choice:
        return {"text": choice["text"] or ""}
    delta = choice.get("delta") or {}
    return {key: delta[key] for key in _TEXTS if isinstance(delta.get(key), str)}

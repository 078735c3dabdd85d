"""The part of a choice that the prefill engine has shown, and how it is taken out of the decode
engine's chunks.

Pure. What is compared is text, not numbers of tokens: a token may show nothing yet (the start of a
thought or of a tool call, a part of a character), an engine may hold text back that could be the
beginning of a stop string, and a chunk may contain several tokens.
"""

from typing import Any

Choice = dict[str, Any]

#: Fields of a delta with text.
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
#: What shows a part of a character. The decode engine shows the whole character later.
_REPLACEMENT = "\ufffd"


def has_token(choice: Choice) -> bool:
    """A chat's first chunk has a role, and empty content."""
    if "text" in choice:
        return True
    delta = choice.get("delta") or {}
    fields = (*_TEXTS, "tool_calls")
    if delta.get("role") is not None and not any(delta.get(key) for key in fields):
        return False
    return any(delta.get(key) is not None for key in fields)


class ShownDelta:
    """Of one choice."""

    def __init__(self) -> None:
        #: Text that the decode engine has not repeated yet, by field.
        self._texts: dict[str, str] = {}
        #: Arguments of tool calls, likewise, by the call's index.
        self._calls: dict[int, str] = {}

    @property
    def repeated(self) -> bool:
        """Whether the decode engine has repeated everything."""
        return not (any(self._texts.values()) or self._calls)

    def add(self, choice: Choice) -> None:
        """A chunk of the prefill engine."""
        for key, text in _texts(choice).items():
            self._texts[key] = self._texts.get(key, "") + text
        for call in _calls(choice):
            index = call.get("index", 0)
            self._calls[index] = self._calls.get(index, "") + _arguments(call)

    def take_out(self, choice: Choice) -> bool:
        """Removes from a chunk of the decode engine what it repeats. Returns whether any text or
        tool call is left. Text that differs from the prefill engine's is a different first token,
        and is removed, too."""
        left = False
        owner = _owner(choice)
        owner.pop("role", None)
        for key, text in _texts(choice).items():
            rest, self._texts[key] = _beyond(text, self._texts.get(key, ""))
            if rest or owner is choice:
                owner[key] = rest
            else:
                del owner[key]
            left = left or bool(rest)
        if calls := _calls(choice):
            if kept := [call for call in calls if self._take_out_call(call)]:
                owner["tool_calls"] = kept
                left = True
            else:
                del owner["tool_calls"]
        return left

    def _take_out_call(self, call: dict[str, Any]) -> bool:
        """The client has the prefill engine's id and name of this call."""
        index = call.get("index", 0)
        shown = self._calls.pop(index, None)
        if shown is None:
            return True
        rest, missing = _beyond(_arguments(call), shown)
        if missing:
            self._calls[index] = missing
        for key in ("id", "type"):
            call.pop(key, None)
        call["function"] = {"arguments": rest}
        return bool(rest)


def _beyond(text: str, shown: str) -> tuple[str, str]:
    """What of `text` was not shown, and what of `shown` is still to be repeated."""
    if not text.startswith(shown) and shown.startswith(text):
        return "", shown[len(text) :]
    for known in (shown, shown.rstrip(_REPLACEMENT)):
        if text.startswith(known):
            return text[len(known) :], ""
    return "", ""


def _owner(choice: Choice) -> dict[str, Any]:
    """Where a chunk has its text. A delta is copied, because it may be null."""
    if "text" not in choice:
        choice["delta"] = dict(choice.get("delta") or {})
        return choice["delta"]
    return choice


def _texts(choice: Choice) -> dict[str, str]:
    if "text" in choice:
        return {"text": choice["text"] or ""}
    delta = choice.get("delta") or {}
    return {key: delta[key] for key in _TEXTS if isinstance(delta.get(key), str)}


def _calls(choice: Choice) -> list[dict[str, Any]]:
    return (choice.get("delta") or {}).get("tool_calls") or []


def _arguments(call: dict[str, Any]) -> str:
    return (call.get("function") or {}).get("arguments") or ""

"""The part of a choice that the prefill engine has shown, and how it is taken out of the decode
engine's chunks.

Pure. What is compared is text, not numbers of tokens: a token may show nothing yet (the start of a
thought or of a tool call, a part of a character), an engine may hold text back that could be the
beginning of a stop string, and a chunk may contain several tokens.
"""

import re
from collections import defaultdict
from typing import Any

Choice = dict[str, Any]

#: Fields of a delta with text.
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_FIRST_WORD = re.compile(r"\s*\S+")
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


class _Shown:
    """One text that the prefill engine has shown. left: what the decode engine has not repeated."""

    def __init__(self) -> None:
        self.left = ""
        self._begun = False

    def take_out(self, text: str, first: int) -> str:
        """What of the decode engine's next text was not shown. first: the length of its first
        token, by which it goes on if its tokens are different ones."""
        shown, self.left = self.left, ""
        if not text.startswith(shown) and shown.startswith(text):
            self.left, self._begun = shown[len(text) :], self._begun or bool(text)
            return ""
        for known in (shown, shown.rstrip(_REPLACEMENT)):
            if text.startswith(known):
                return text[len(known) :]
        return text if self._begun else text[first:]


class ShownDelta:
    """Of one choice."""

    def __init__(self) -> None:
        #: By field.
        self._texts: defaultdict[str, _Shown] = defaultdict(_Shown)
        #: Arguments of tool calls, by the call's index.
        self._calls: defaultdict[int, _Shown] = defaultdict(_Shown)

    @property
    def repeated(self) -> bool:
        """Whether the decode engine has repeated everything."""
        return not (any(one.left for one in self._texts.values()) or self._calls)

    def add(self, choice: Choice) -> None:
        """A chunk of the prefill engine."""
        for key, text in _texts(choice).items():
            self._texts[key].left += text
        for call in _calls(choice):
            self._calls[call.get("index", 0)].left += _arguments(call)

    def take_out(self, choice: Choice) -> bool:
        """Removes from a chunk of the decode engine what it repeats. Returns whether any text or
        tool call is left. Of text that differs from the prefill engine's, the first token is
        removed: it is the decode engine's own first one."""
        left = False
        first = _first_token(choice)
        owner = _owner(choice)
        owner.pop("role", None)
        for key, text in _texts(choice).items():
            rest = self._texts[key].take_out(text, _length_of_first(text, first))
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
        shown = self._calls.get(index)
        if shown is None:
            return True
        arguments = _arguments(call)
        rest = shown.take_out(arguments, _length_of_first(arguments))
        if not shown.left:
            del self._calls[index]
        for key in ("id", "type"):
            call.pop(key, None)
        call["function"] = {"arguments": rest}
        return bool(rest)


def _length_of_first(text: str, token: str = "") -> int:
    """Of the first token of a text. token: what the chunk says it is. Without it, no more than the
    first word is taken for it: few tokens go on after a space."""
    if token and text.startswith(token):
        return len(token)
    found = _FIRST_WORD.match(text)
    return len(text) if found is None else found.end()


def _first_token(choice: Choice) -> str:
    """The text of its first token, from its log probabilities; empty without them."""
    logprobs: Any = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return ""
    tokens: Any = logprobs.get("tokens") or logprobs.get("content")  # completions; chats
    first: Any = tokens[0] if isinstance(tokens, list) and tokens else ""
    token: Any = first.get("token") if isinstance(first, dict) else first
    return token if isinstance(token, str) else ""


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

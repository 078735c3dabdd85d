"""Changes to an answer on its way to the client, where a protocol needs any.

Most answers pass as bytes. Where something must change, a stream is cut into whole events, and only
events that contain what changes are parsed.

**Cached tokens.** A decode engine that got its KV from a prefill engine may report nearly the whole
prompt as cached. The client gets the number of tokens that the prefill engine had in its cache.

**Transfer parameters** name engines' addresses, and a decode engine of a bidirectional transfer
returns some. They are blanked in every answer.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_lite.forward.protocols.base import Body, Leg, PrefillAnswer
from dynamo_lite.forward.protocols.one_token import object_of, plain

#: In answers of chat and completions, and of responses.
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
#: An answer or event without these bytes has nothing to correct.
_CACHED = b'"cached_tokens"'
#: By this field vLLM 0.32 tells the decode engine what its usage must show.
_TOLD = "remote_prefill_cached_tokens"
_TOLD_BYTES = f'"{_TOLD}"'.encode()
#: The beginning of transfer parameters. Inside a JSON string its quotes would be escaped.
_PARAMS = re.compile(rb'"(?:kv|ec)_transfer_params"\s*:\s*\{')
_PARAMS_NAME = b"_transfer_params"
#: Such a beginning is shorter.
_TAIL_BYTES = 64


class ParamsBlanker:
    """Replaces the content of transfer parameters with spaces in an answer that comes in pieces.
    The answer's length does not change."""

    def __init__(self) -> None:
        #: The last bytes of the piece before.
        self._tail = b""
        #: Depth of objects inside transfer parameters; 0 outside.
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, data: bytes) -> bytes:
        shown = b""
        while data:
            if self._depth:
                end = self._end(data)
                shown, data = shown + b" " * end, data[end:]
                continue
            text = self._tail + data
            found = _PARAMS.search(text) if _PARAMS_NAME in text else None
            if found is None:
                self._tail = text[-_TAIL_BYTES:]
                return shown + data
            begin = found.end() - len(self._tail)
            shown, data = shown + data[:begin], data[begin:]
            self._tail, self._depth = b"", 1
        return shown

    def _end(self, data: bytes) -> int:
        """How many of these bytes are inside."""
        for at, byte in enumerate(data):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = byte == ord("\\"), byte != ord('"')
            elif byte == ord('"'):
                self._in_string = True
            elif byte in b"{}":
                self._depth += 1 if byte == ord("{") else -1
                if not self._depth:
                    return at
        return len(data)


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes in an answer. The default changes nothing."""

    #: Number of cached tokens for the usage; None: unchanged.
    cached_tokens: int | None = None
    #: A request id of ours that contains addresses, and its replacement.
    hidden: tuple[bytes, bytes] | None = None

    @property
    def any(self) -> bool:
        return not (self.cached_tokens is self.hidden is None)

    def whole(self, data: bytes) -> bytes:
        """Changes an answer that is one JSON document."""
        if self.hidden is not None:
            data = data.replace(*self.hidden)
        if self.cached_tokens is not None:
            data = with_cached_tokens(data, self.cached_tokens)
        return data

    def events(self, data: bytes) -> bytes:
        """Changes whole events."""
        if self.hidden is not None:
            data = data.replace(*self.hidden)
        cached = self.cached_tokens
        if cached is None or _CACHED not in data:
            return data
        return b"\n".join(
            _corrected(line, cached) if line.startswith(b"data:") and _CACHED in line else line
            for line in data.split(b"\n")
        )


def _corrected(line: bytes, cached: int) -> bytes:
    """A line without its LF. It keeps the CR of a CRLF."""
    event = with_cached_tokens(line[5:].strip(), cached)
    return b"data: " + event + (b"\r" if line.endswith(b"\r") else b"")


UNCHANGED = Changes()


def changes_for(leg: Leg, answer: PrefillAnswer) -> Changes:
    """The changes for the answer of this leg. answer: of the prefill leg."""
    cached, hidden = cached_by_prefill(answer, leg.body), None
    if leg.hidden is not None:
        found, shown = leg.hidden
        hidden = (found.encode(), shown.encode())
    return Changes(cached_tokens=cached, hidden=hidden)


def cached_by_prefill(answer: PrefillAnswer, decode_body: Body) -> int | None:
    """The cached tokens that the decode leg's usage must show; None: the usage is already right, or
    the number is not known.

    A prefill engine's params have the number with every connector, but not every protocol passes
    them on to the decode engine.
    """
    if _tells(decode_body.get("kv_transfer_params")):
        return None
    if _TOLD_BYTES in bytes(answer.kv_transfer_params):
        found = (object_of(answer.kv_transfer_params) or {}).get(_TOLD)
        if isinstance(found, int):
            return found
    return cached_tokens(plain(answer.usage))


def _tells(params: Any) -> bool:
    """Whether these params of a decode leg have the number."""
    if isinstance(params, msgspec.Raw):
        return _TOLD_BYTES in bytes(params)
    return isinstance(params, dict) and _TOLD in params


def cached_tokens(usage: Any) -> int | None:
    """None if the usage does not contain them."""
    if not isinstance(usage, dict):
        return None
    for name in _DETAILS:
        details = usage.get(name)
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            return details["cached_tokens"]
    return None


def with_cached_tokens(document: bytes, cached: int) -> bytes:
    """A JSON answer, or one event's JSON, with this number in its usage; unchanged if it has
    none, or cannot be read."""
    if _CACHED not in document:
        return document
    try:
        answer = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        # The events of `/v1/responses` have the whole answer inside.
        for key in ("usage", "response"):
            if key in answer and _CACHED in bytes(answer[key]):
                value = plain(answer[key])
                _correct(value, cached)
                answer[key] = msgspec.Raw(msgspec.json.encode(value))
        return msgspec.json.encode(answer)
    except (ValueError, RecursionError):
        return document


def _correct(value: Any, cached: int) -> None:
    if not isinstance(value, dict):
        return
    for name in _DETAILS:
        details = value.get(name)
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            details["cached_tokens"] = cached
    _correct(value.get("usage"), cached)

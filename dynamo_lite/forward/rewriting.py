"""Changes to an answer on its way to the client, where a protocol needs any.

Most answers pass as bytes. Where something must change, a stream is cut into whole events, and only
events that contain what changes are parsed.

**Cached tokens.** A decode engine that got its KV from a prefill engine may report nearly the whole
prompt as cached. The client gets the number of tokens that the prefill engine had in its cache.

**Log probabilities of the prompt.** With `return_logprob`, SGLang's `/generate` answers
`meta_info.input_token_logprobs`. The prefill engine has those of the tokens that it computed, the
decode engine has the rest. The client gets the prefill engine's list followed by the decode
engine's, also in each event of a stream. Source: sgl-project/sglang,
`sgl-model-gateway/src/routers/http/pd_router.rs`. SGLang's gateway does not change batches; here
each sequence gets its own list. The lists are joined as JSON text: no number is decoded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

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
_LOGPROBS = "input_token_logprobs"
_LOGPROBS_BYTES = b'"input_token_logprobs"'

_Object: TypeAlias = dict[str, msgspec.Raw]


class InputLogprobs:
    """Reads the prefill engine's answer, and changes the decode engine's."""

    def __init__(self) -> None:
        #: By index of the sequence: the text between the brackets of its list.
        self._lists: dict[int, bytes] = {}

    def read(self, data: bytes) -> None:
        """A whole answer of the prefill engine: JSON, or a stream of events."""
        if data.lstrip()[:1] in (b"{", b"["):
            self._read_document(data)
            return
        for line in data.split(b"\n"):
            if line.startswith(b"data:") and _LOGPROBS_BYTES in line:
                self._read_document(line[5:])

    def joined(self, document: bytes) -> bytes:
        """The decode engine's answer, or one event's JSON, with both lists; unchanged if it has
        none."""
        if not self._lists or _LOGPROBS_BYTES not in document:
            return document
        value = _decoded(document)
        if isinstance(value, list):
            return msgspec.json.encode(
                [self._join(one, number) for number, one in enumerate(value)]
            )
        return document if value is None else msgspec.json.encode(self._join(value, 0))

    def _read_document(self, data: bytes) -> None:
        value = _decoded(data)
        for number, one in enumerate(value if isinstance(value, list) else [value or {}]):
            inner = _inner(_object(one.get("meta_info")).get(_LOGPROBS))
            if inner is not None:
                self._lists[_index(one, number)] = inner

    def _join(self, answer: _Object, number: int) -> _Object:
        first = self._lists.get(_index(answer, number))
        meta = _object(answer.get("meta_info"))
        second = _inner(meta.get(_LOGPROBS))
        if first is None or second is None:
            return answer
        both = b",".join(part for part in (first, second) if part.strip())
        meta[_LOGPROBS] = msgspec.Raw(b"[" + both + b"]")
        return {**answer, "meta_info": msgspec.Raw(msgspec.json.encode(meta))}


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes in an answer. The default changes nothing."""

    #: Number of cached tokens for the usage; None: unchanged.
    cached_tokens: int | None = None
    #: A request id of ours that contains addresses, and its replacement.
    hidden: tuple[bytes, bytes] | None = None
    #: The prefill engine's log probabilities.
    logprobs: InputLogprobs | None = None

    @property
    def any(self) -> bool:
        return not (self.cached_tokens is self.hidden is self.logprobs is None)

    def whole(self, data: bytes) -> bytes:
        """Changes an answer that is one JSON document."""
        if self.hidden is not None:
            data = data.replace(*self.hidden)
        if self.cached_tokens is not None:
            data = with_cached_tokens(data, self.cached_tokens)
        return data if self.logprobs is None else self.logprobs.joined(data)

    def events(self, data: bytes) -> bytes:
        """Changes whole events."""
        if self.hidden is not None:
            data = data.replace(*self.hidden)
        cached, logprobs = self.cached_tokens, self.logprobs
        if cached is not None:
            data = _each(data, _CACHED, lambda event: with_cached_tokens(event, cached))
        return data if logprobs is None else _each(data, _LOGPROBS_BYTES, logprobs.joined)


def _each(data: bytes, mark: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Changes the JSON of the events that contain the mark."""
    if mark not in data:
        return data
    return b"\n".join(
        _with_change(line, change) if line.startswith(b"data:") and mark in line else line
        for line in data.split(b"\n")
    )


def _with_change(line: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A line without its LF. It keeps the CR of a CRLF."""
    return b"data: " + change(line[5:].strip()) + (b"\r" if line.endswith(b"\r") else b"")


UNCHANGED = Changes()


def changes_for(
    leg: Leg,
    answer: PrefillAnswer,
    logprobs: InputLogprobs | None = None,
) -> Changes:
    """The changes for the answer of this leg. answer, logprobs: of the prefill leg."""
    cached, hidden = cached_by_prefill(answer, leg.body), None
    if leg.hidden is not None:
        found, shown = leg.hidden
        hidden = (found.encode(), shown.encode())
    return Changes(cached_tokens=cached, hidden=hidden, logprobs=logprobs)


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


def _decoded(document: bytes) -> _Object | list[_Object] | None:
    try:
        return msgspec.json.decode(document, type=_Object | list[_Object])
    except (ValueError, RecursionError):
        return None


def _object(value: msgspec.Raw | None) -> _Object:
    try:
        return {} if value is None else msgspec.json.decode(value, type=_Object)
    except (ValueError, RecursionError):
        return {}


def _inner(value: msgspec.Raw | None) -> bytes | None:
    """The text between the brackets; None if the value is not a list."""
    text = b"" if value is None else bytes(value).strip()
    return text[1:-1] if text.startswith(b"[") else None


def _index(answer: _Object, number: int) -> int:
    """Events of a batch say which sequence they are of."""
    try:
        value: Any = msgspec.json.decode(answer["index"])
    except (KeyError, ValueError, RecursionError):
        return number
    return value if isinstance(value, int) else number

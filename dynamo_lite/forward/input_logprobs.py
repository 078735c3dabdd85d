"""SGLang's log probabilities of the prompt's tokens, of both engines in one answer.

With `return_logprob`, `/generate` answers `meta_info.input_token_logprobs`. The prefill engine has
the log probabilities of the tokens that it computed, the decode engine has the rest. The client
gets the prefill engine's list followed by the decode engine's, also in each event of a stream.
Source: sgl-project/sglang, `sgl-model-gateway/src/routers/http/pd_router.rs`. SGLang's gateway
does not change batches; here each sequence gets its own list.

The lists are joined as JSON text: no number is decoded.
"""

from typing import Any, TypeAlias

import msgspec

_FIELD = "input_token_logprobs"
#: An answer or event without these bytes has nothing to join.
MARK = b'"input_token_logprobs"'

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
            if line.startswith(b"data:") and MARK in line:
                self._read_document(line[5:])

    def joined(self, document: bytes) -> bytes:
        """The decode engine's answer, or one event's JSON, with both lists; unchanged if it has
        none."""
        if not self._lists or MARK not in document:
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
            inner = _inner(_object(one.get("meta_info")).get(_FIELD))
            if inner is not None:
                self._lists[_index(one, number)] = inner

    def _join(self, answer: _Object, number: int) -> _Object:
        first = self._lists.get(_index(answer, number))
        meta = _object(answer.get("meta_info"))
        second = _inner(meta.get(_FIELD))
        if first is None or second is None:
            return answer
        both = b",".join(part for part in (first, second) if part.strip())
        meta[_FIELD] = msgspec.Raw(b"[" + both + b"]")
        return {**answer, "meta_info": msgspec.Raw(msgspec.json.encode(meta))}


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

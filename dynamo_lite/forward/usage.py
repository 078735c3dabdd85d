"""The cached tokens in an answer's usage.

A decode engine that got its KV from a prefill engine may report nearly the whole prompt as cached.
The client gets the number of tokens that the prefill engine had in its cache.
"""

from typing import Any

import msgspec

from dynamo_lite.forward.protocols.base import Body, PrefillAnswer
from dynamo_lite.forward.protocols.one_token import object_of, plain

#: In answers of chat and completions, and of responses.
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
#: An answer or event without these bytes has nothing to correct.
MARK = b'"cached_tokens"'
#: By this field vLLM 0.32 tells the decode engine what its usage must show.
_FIELD = "remote_prefill_cached_tokens"
_QUOTED = f'"{_FIELD}"'.encode()


def cached_by_prefill(answer: PrefillAnswer, decode_body: Body) -> int | None:
    """The cached tokens that the decode leg's usage must show; None: the usage is already right, or
    the number is not known.

    A prefill engine's params have the number with every connector, but not every protocol passes
    them on to the decode engine.
    """
    if _tells(decode_body.get("kv_transfer_params")):
        return None
    if _QUOTED in bytes(answer.kv_transfer_params):
        found = (object_of(answer.kv_transfer_params) or {}).get(_FIELD)
        if isinstance(found, int):
            return found
    return cached_tokens(plain(answer.usage))


def _tells(params: Any) -> bool:
    """Whether these params of a decode leg have the number."""
    if isinstance(params, msgspec.Raw):
        return _QUOTED in bytes(params)
    return isinstance(params, dict) and _FIELD in params


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
    if MARK not in document:
        return document
    try:
        answer = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        # The events of `/v1/responses` have the whole answer inside.
        for key in ("usage", "response"):
            if key in answer and MARK in bytes(answer[key]):
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

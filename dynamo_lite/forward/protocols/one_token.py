"""The body of a prefill leg: the client's, limited to one token."""

from typing import Any, cast

import msgspec

from dynamo_lite.forward.protocols.base import RESPONSES, TOKENS, Body, Params

NO_PARAMS = Params(b"null")


def one_token(body: Body, route: str) -> Body:
    """A copy that asks for one token, not streamed.

    `min_tokens: 1` masks the end of the sequence for that token: some connectors keep the KV only
    of a request that ended by its length. It also replaces a client's `min_tokens`, which must
    not be above `max_tokens`. `stream_options` are refused without `stream: true`.
    """
    one = {key: value for key, value in body.items() if key != "stream_options"}
    one["stream"] = False
    if route == TOKENS:
        one["sampling_params"] = {
            **(object_of(body.get("sampling_params")) or {}),
            "max_tokens": 1,
            "min_tokens": 1,
        }
    elif route == RESPONSES:
        one["max_output_tokens"] = 1
        # An engine that stores answers would store this one under an id of its own.
        one["store"] = False
    else:
        one["max_tokens"] = 1
        one["min_tokens"] = 1
        if "max_completion_tokens" in body:
            one["max_completion_tokens"] = 1
    return one


def object_of(value: Any) -> dict[str, Any] | None:
    """A body's value, decoded, if it is an object."""
    found = plain(value)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def plain(value: Any) -> Any:
    """A body's value, decoded. Raises ValueError for numbers that are too large."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


class _Answer(msgspec.Struct):
    kv_transfer_params: Params = NO_PARAMS


def params_of(answer: bytes) -> Params:
    """Raises ValueError and RecursionError when a prefill leg's answer is no JSON, or the
    parameters cannot be decoded. An answer of another form, such as a list, has none."""
    try:
        params = msgspec.json.decode(answer, type=_Answer).kv_transfer_params
    except msgspec.ValidationError:
        return NO_PARAMS
    msgspec.json.decode(params)  # as raw JSON, they were only skipped
    return params

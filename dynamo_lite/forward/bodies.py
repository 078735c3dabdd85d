"""Reads the parts of a client's body that forwarding needs, and removes forbidden fields.

The top level is decoded into raw values: messages, prompts and tools are never decoded, nor
encoded again, and reach the engines byte by byte as the client wrote them.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo_lite.forward.client import error
from dynamo_lite.forward.failures import Final
from dynamo_lite.forward.protocols.base import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    SGLANG_GENERATE,
    TOKENS,
    Body,
)
from dynamo_lite.forward.protocols.one_token import object_of, plain

#: More sequences in one request than any engine runs.
MAX_SEQUENCES = 4096
#: Only a forwarder may set these: with them a client could make an engine read from a foreign
#: host, or end its process (vLLM 0.32 fails assertions on them).
_OURS = ("kv_transfer_params", "ec_transfer_params")
_OURS_PREFIXES = ("bootstrap_", "disagg_prefill_")
_MARKS = (b"_transfer_params", *(prefix.encode() for prefix in _OURS_PREFIXES), b"\\")
#: Objects whose content, or whose `extra_args`, become vLLM's `extra_args`, where it looks for the
#: transfer parameters; and fields of the request for SGLang's `/vertex_generate`.
_NESTED = ("vllm_xargs", "sampling_params", "parameters")
#: The name of such an object among the fields of a form, and spellings of it that are not plain:
#: vLLM reads forms, whose values are not looked into here.
_FORM_FIELD = re.compile(
    rb'^content-disposition:[^\r\n]*;\s*+name\s*+(\*|=\s*+"?[^";\r\n]*(\\|vllm_xargs))',
    re.IGNORECASE | re.MULTILINE,
)

#: White space, the zeros in it in UTF-16 and UTF-32, and marks of the byte order.
_BEFORE_OBJECT = b" \t\r\n\0\xef\xbb\xbf\xff\xfe"

#: The field with the prompt of each route.
_PROMPT_FIELDS = {
    CHAT: ("tools", "messages"),
    MESSAGES: ("tools", "system", "messages"),
    COMPLETIONS: ("prompt",),
    RESPONSES: ("tools", "instructions", "input"),
    TOKENS: ("token_ids",),
    SGLANG_GENERATE: ("text", "input_ids"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A client's request."""

    #: Empty: it is passed on to one decode engine.
    route: str = ""
    #: The body without the fields that only a forwarder may set.
    body: Body = field(default_factory=Body)
    #: The same as bytes: the client's own if nothing was removed.
    data: bytes
    #: Why it must go to a decode engine alone with any protocol; empty if it need not.
    alone: str = ""
    #: Why it has several sequences; empty if it has one.
    batch: str = ""
    #: How many sequences (`n` times prompts).
    sequences: int = 1
    stream: bool = False
    #: The prompt as raw JSON; equal prefixes of prompts are equal prefixes of it.
    prompt: bytes = field(default=b"", repr=False)


def read(route: str, data: bytes) -> ClientRequest:
    """route: of a request to generate; empty for any other. What no JSON parser takes for an object
    is passed on as it is: the engine's own error text explains it better. Raises Final."""
    try:
        body = _parse(data)
        if body is not None:
            return _read(route, body, data)
    except (ValueError, RecursionError) as exc:
        # Forbidden fields could not be removed. An engine's parser may read it.
        text = "the body must be strict JSON in UTF-8, and not nested too deeply"
        raise Final(error(400, "BadRequestError", text)) from exc
    if _FORM_FIELD.search(data):
        text = "a form may not have a field vllm_xargs, nor escapes in the names of its fields"
        raise Final(error(400, "BadRequestError", text))
    return ClientRequest(data=data)


def _sanitize(body: Body) -> bool:
    """Removes the fields that only a forwarder may set. Returns whether there were any."""
    removed = _remove(body)
    for key in _NESTED:
        raw = bytes(msgspec.Raw(body[key])) if key in body else b""
        # With an escape a key may be spelt in many ways.
        if any(mark in raw for mark in _MARKS):
            value = object_of(body[key]) or {}
            if _remove(value) | _remove(value.get("extra_args")):
                body[key] = value
                removed = True
    return removed


def _read(route: str, body: Body, data: bytes) -> ClientRequest:
    clean = msgspec.json.encode(body) if _sanitize(body) else data
    if not route:
        return ClientRequest(data=clean)
    sequences, batch = _sequences(route, body)
    if sequences > MAX_SEQUENCES:
        text = f"{sequences} sequences in one request; at most {MAX_SEQUENCES}"
        raise Final(error(400, "BadRequestError", text))
    return ClientRequest(
        route=route,
        body=body,
        data=clean,
        alone=_alone(route, body),
        batch=batch,
        sequences=sequences,
        stream=_set(body.get("stream")),
        prompt=b"".join(bytes(body[key]) for key in _PROMPT_FIELDS.get(route, ()) if key in body),
    )


def _parse(data: bytes) -> Body | None:
    """None: it is no object.

    Engines use Python's parser, which takes more than the standard for an object (NaN, UTF-16,
    halves of surrogate pairs). Raises ValueError for what may be one of these.
    """
    try:
        data.decode()  # raw values are not checked for it
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return None
    except ValueError:
        if data.lstrip(_BEFORE_OBJECT).startswith(b"{"):
            raise
        return None


def _remove(fields: Any) -> bool:
    """Whether anything was removed."""
    if not isinstance(fields, dict):
        return False
    found = [key for key in fields if key in _OURS or key.startswith(_OURS_PREFIXES)]
    for key in found:
        del fields[key]
    return bool(found)


def _alone(route: str, body: Body) -> str:
    """Why a disaggregated request would be answered wrongly, or end an engine."""
    if _set(body.get("echo")):
        return "echo"
    if plain(body.get("prompt_logprobs")) is not None:
        return "prompt_logprobs"
    parameters = plain(body.get("sampling_params")) if route == TOKENS else None
    if isinstance(parameters, dict) and "prompt_logprobs" in parameters:
        return "prompt_logprobs"
    # From this position of the prompt on; each engine has those of its own tokens only.
    start = plain(body.get("logprob_start_len")) if route == SGLANG_GENERATE else None
    if start not in (None, -1) and _set(body.get("return_logprob")):
        return "prompt_logprobs"
    if _set(body.get("use_beam_search")):
        return "beam_search"
    if "prompt_embeds" in body:
        return "prompt_embeds"
    # vLLM before 0.32 cuts the prompt by the tokens to generate, of which a prefill leg has one.
    cut = plain(body.get("truncate_prompt_tokens"))
    if cut is not None and (_count(cut) is None or _count(cut) == -1):
        return "truncation"
    if route == RESPONSES and "truncation" in body and plain(body["truncation"]) != "disabled":
        return "truncation"
    # Stored answers are in one engine's memory; a request in the background outlives its legs.
    if plain(body.get("previous_response_id")) or _set(body.get("background")):
        return "stored_response"
    return ""


def _sequences(route: str, body: Body) -> tuple[int, str]:
    """How many sequences are answered, and why there may be more than one.

    `best_of` does not count: SGLang, which gets a room for each sequence, ignores it.
    """
    parameters = plain(body.get("sampling_params")) if route in (TOKENS, SGLANG_GENERATE) else None
    given = [_count(plain(body.get("n")))]
    if isinstance(parameters, dict):
        given.append(_count(parameters.get("n")))
    n = max(value or 1 for value in given)
    best_of = _count(plain(body.get("best_of")))
    prompts = max(
        (_prompts(body[key]) for key in ("prompt", "text", "input_ids") if key in body), default=1
    )
    if prompts > 1:
        return max(n, 1) * prompts, "prompts"
    # An unclear number is as good as several: the engine may read it otherwise.
    several = any(value is None or value > 1 for value in (*given, best_of))
    return max(n, 1), "n" if several else ""


def _prompts(value: Any) -> int:
    """A list of numbers is one prompt, any other list one for each element."""
    raw = bytes(value)
    if not raw.startswith(b"["):
        return 1
    if raw[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    return len(msgspec.json.decode(raw, type=list[msgspec.Raw]))


def _count(value: Any) -> int | None:
    """A decoded number as engines read it: pydantic also takes "3" and 2.0 for integers. 1 for
    null; None if it is unclear."""
    if value is None:
        return 1
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if number.is_integer() else None


#: What pydantic takes for false, in lower case.
_OFF = (None, False, "false", "f", "no", "n", "off", "0")


def _set(value: Any) -> bool:
    """Whether a flag may be on. What is not certainly false may be."""
    found = plain(value)
    return (found.lower() if isinstance(found, str) else found) not in _OFF

"""What is read of a client's body and removed from it, and the body of a prefill leg."""

import json
from typing import Any

import msgspec
import pytest

from dynamo_lite.forward import bodies
from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.failures import Final
from dynamo_lite.forward.protocols.base import CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOKENS
from dynamo_lite.forward.protocols.one_token import one_token

FORGED: dict[str, Any] = {"do_remote_prefill": True, "remote_host": "10.0.0.9"}


def encoded(body: Any) -> Any:
    return json.loads(msgspec.json.encode(body))


def test_a_clean_body_stays_as_its_bytes():
    data = b'{ "prompt" : "a",  "x": 1.0, "big": 123456789012345678901234567890 }'
    request = bodies.read(COMPLETIONS, data)
    assert request.data is data
    assert msgspec.json.encode(request.body) == (
        b'{"prompt":"a","x":1.0,"big":123456789012345678901234567890}'
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": FORGED},
        {"kv_transfer_params": None},
        {"ec_transfer_params": FORGED},
        {"bootstrap_host": "10.0.0.9", "bootstrap_port": 1, "bootstrap_room": 2},
        {"disagg_prefill_dp_rank": 3},
        {"vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": "y"}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": FORGED}}},
        {"instances": [{}], "parameters": {"bootstrap_host": "10.0.0.9", "bootstrap_room": 2}},
    ],
)
def test_what_only_a_forwarder_may_set_is_removed(fields: dict[str, Any]):
    request = bodies.read(COMPLETIONS, json.dumps({"prompt": "p", **fields}).encode())
    assert request.data == msgspec.json.encode(request.body)
    left = json.loads(request.data)
    assert left["prompt"] == "p"
    assert not any(word in str(left) for word in ("transfer_params", "bootstrap", "disagg"))


def test_keys_with_escapes_and_repeated_keys_are_no_way_around():
    data = b'{"kv\\u005ftransfer_params": {"a": 1}, "prompt": "p", "prompt": "q"}'
    request = bodies.read(COMPLETIONS, data)
    assert json.loads(request.data) == {"prompt": "q"}


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a\\"b.wav"\r\n\r\n'
    b"\xff\0 vllm_xargs\r\n"
    b'--x\r\ncontent-disposition: form-data; %b\r\n\r\n{"kv_transfer_params": 0}\r\n--x--\r\n'
)


@pytest.mark.parametrize(
    "name",
    [
        *(b'name="vllm_xargs"', b'filename="a"; name=VLLM_xargs', b'name="vllm\\_xargs"'),
        *(b"name*=utf-8''vllm%5Fxargs", b'name*0="vllm"; name*1="_xargs"'),
    ],
)
def test_a_form_cannot_have_them_either(name: bytes):
    with pytest.raises(Final) as refused:
        bodies.read("", FORM % name)
    assert b"a form may not have a field vllm_xargs" in refused.value.answer.body


def test_any_other_form_is_passed_on():
    data = FORM % b'name="prompt"'
    assert bodies.read("", data).data is data


@pytest.mark.parametrize("filler", [b" ", b";", b"; name=", b'"', b"\r\n"])
def test_no_form_takes_long(filler: bytes):
    """Quadratic time would be hours."""
    data = b"content-disposition:;name=" + filler * (1 << 20)
    assert bodies.read("", data).data is data


@pytest.mark.parametrize(
    ("route", "data", "left"),
    [
        (
            COMPLETIONS,
            b'{"vllm_xargs": {"kv\\u005ftransfer\\u005fparams": ["x"], "a": 1}, "n": 2}',
            {"vllm_xargs": {"a": 1}, "n": 2},
        ),
        (
            TOKENS,
            b'{"sampling_params": {"extra_args": {"kv_transfer\\u005fparams": {"b": 2}}}}',
            {"sampling_params": {"extra_args": {}}},
        ),
    ],
)
def test_nor_are_those_inside(route: str, data: bytes, left: dict):
    request = bodies.read(route, data)
    assert json.loads(request.data) == left


@pytest.mark.parametrize("key", [b"prompt_logprobs", b"prompt\\u005flogprobs"])
def test_prompt_logprobs_are_found_in_sampling_params(key: bytes):
    data = b'{"sampling_params": {"%s": 1, "extra_args": {"kv_transfer_params": {}}}}' % key
    assert bodies.read(TOKENS, data).alone == "prompt_logprobs"


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": NaN, "kv_transfer_params": {}}',
        b'{"prompt": "\\ud800", "kv_transfer_params": {}}',
        '{"a": "é", "kv_transfer_params": {}}'.encode("utf-16"),
        ' {"a": "é", "kv_transfer_params": {}}'.encode("utf-16-be"),
        ' {"a": "é", "kv_transfer_params": {}}'.encode("utf-32"),
        b'\xef\xbb\xbf{"kv_transfer_params": {}}',
        b'{"x": "\xff", "kv_transfer_params": {}}',
        b'{"sampling_params": {"vllm_xargs": "\xff"}}',
        b'{"x": %b, "kv_transfer_params": {}}' % DEEP,
        b'{"vllm_xargs": {"a": %b, "kv_transfer_params": 1}}' % (b"9" * 5000),
        b"{",
    ],
)
def test_an_object_that_only_an_engines_parser_might_read_is_refused(data: bytes):
    """Whether it has a forbidden field is not known."""
    for route in (COMPLETIONS, ""):
        with pytest.raises(Final) as refused:
            bodies.read(route, data)
        assert b"strict JSON" in refused.value.answer.body


@pytest.mark.parametrize("data", [b"", b"[1]", b'"x"', b"\0\xff", b"[NaN]", b"--x {NaN", DEEP])
def test_no_object_is_passed_on(data: bytes):
    assert bodies.read(COMPLETIONS, data) == ClientRequest(data=data)


@pytest.mark.parametrize(
    ("value", "stream"), [(True, True), ("1", True), (1, True), ("false", False)]
)
def test_a_stream_may_be_asked_for_in_many_ways(value: Any, stream: bool):
    data = json.dumps({"prompt": "p", "stream": value}).encode()
    assert bodies.read(COMPLETIONS, data).stream is stream


@pytest.mark.parametrize(
    ("route", "fields", "alone", "batch", "sequences"),
    [
        (COMPLETIONS, {"prompt": "p"}, "", "", 1),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, "", "", 1),
        (COMPLETIONS, {"prompt": [ ]}, "", "", 1),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "", "prompts", 2),
        (COMPLETIONS, {"prompt": [[1], [2], [3]], "n": 2}, "", "prompts", 6),
        (COMPLETIONS, {"prompt": "p", "n": 3}, "", "n", 3),
        (COMPLETIONS, {"prompt": "p", "n": None}, "", "", 1),
        # Engines' models are pydantic's, which takes these for numbers and flags.
        (COMPLETIONS, {"prompt": "p", "n": "3"}, "", "n", 3),
        (COMPLETIONS, {"prompt": "p", "n": " 3.0 "}, "", "n", 3),
        (COMPLETIONS, {"prompt": "p", "n": 2.0}, "", "n", 2),
        (COMPLETIONS, {"prompt": "p", "n": "1"}, "", "", 1),
        (COMPLETIONS, {"prompt": "p", "n": True}, "", "", 1),
        (COMPLETIONS, {"prompt": "p", "n": "x"}, "", "n", 1),
        (COMPLETIONS, {"prompt": "p", "n": 300 * "0" + "3"}, "", "n", 3),
        (COMPLETIONS, {"prompt": "p", "best_of": "2"}, "", "n", 1),
        (COMPLETIONS, {"prompt": "p", "echo": 1}, "echo", "", 1),
        (COMPLETIONS, {"prompt": "p", "echo": "Yes"}, "echo", "", 1),
        (COMPLETIONS, {"prompt": "p", "echo": "off"}, "", "", 1),
        (COMPLETIONS, {"prompt": "p", "echo": 0.0}, "", "", 1),
        (COMPLETIONS, {"prompt": "p", "echo": None}, "", "", 1),
        (CHAT, {"messages": [], "use_beam_search": "true"}, "beam_search", "", 1),
        (RESPONSES, {"input": "x", "background": "on"}, "stored_response", "", 1),
        (TOKENS, {"sampling_params": {"n": "2"}}, "", "n", 2),
        (COMPLETIONS, {"prompt": "p", "best_of": 2}, "", "n", 1),
        (COMPLETIONS, {"prompt": "p", "echo": True}, "echo", "", 1),
        (COMPLETIONS, {"prompt": "p", "prompt_logprobs": 0}, "prompt_logprobs", "", 1),
        (COMPLETIONS, {"prompt_embeds": "x"}, "prompt_embeds", "", 1),
        (CHAT, {"messages": [], "n": 2}, "", "n", 2),
        (CHAT, {"messages": [], "use_beam_search": True}, "beam_search", "", 1),
        (RESPONSES, {"input": "x", "previous_response_id": "r"}, "stored_response", "", 1),
        (RESPONSES, {"input": "x", "background": True}, "stored_response", "", 1),
        (COMPLETIONS, {"prompt": "p", "truncate_prompt_tokens": 9}, "", "", 1),
        (COMPLETIONS, {"prompt": "p", "truncate_prompt_tokens": None}, "", "", 1),
        (COMPLETIONS, {"prompt": "p", "truncate_prompt_tokens": -1}, "truncation", "", 1),
        (CHAT, {"messages": [], "truncate_prompt_tokens": "-1"}, "truncation", "", 1),
        (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation", "", 1),
        (RESPONSES, {"input": "x", "truncation": None}, "truncation", "", 1),
        (RESPONSES, {"input": "x", "truncation": "disabled"}, "", "", 1),
        (TOKENS, {"sampling_params": {"n": 2}}, "", "n", 2),
        (TOKENS, {"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs", "", 1),
    ],
)  # fmt: skip
def test_what_cannot_be_handed_over(
    route: str, fields: dict[str, Any], alone: str, batch: str, sequences: int
):
    request = bodies.read(route, json.dumps(fields).encode())
    assert (request.alone, request.batch, request.sequences) == (alone, batch, sequences)


@pytest.mark.parametrize(
    ("route", "fields", "expected"),
    [
        (COMPLETIONS, {}, {"max_tokens": 1, "min_tokens": 1}),
        (
            CHAT,
            {"max_completion_tokens": 9, "min_tokens": 5},
            {"max_tokens": 1, "min_tokens": 1, "max_completion_tokens": 1},
        ),
        (MESSAGES, {"max_tokens": 9}, {"max_tokens": 1, "min_tokens": 1}),
        (RESPONSES, {"max_output_tokens": 9}, {"max_output_tokens": 1, "store": False}),
        (
            TOKENS,
            {"sampling_params": {"max_tokens": 9, "top_k": 2}},
            {"sampling_params": {"max_tokens": 1, "min_tokens": 1, "top_k": 2}},
        ),
    ],
)
def test_a_prefill_body_asks_for_one_token(
    route: str, fields: dict[str, Any], expected: dict[str, Any]
):
    own = {"stream": True, "stream_options": {"include_usage": True}, "seed": 1, **fields}
    body = bodies.read(route, json.dumps(own).encode()).body
    before = dict(body)
    kept = {key: value for key, value in fields.items() if key not in expected}
    assert encoded(one_token(body, route)) == {"stream": False, "seed": 1, **kept, **expected}
    assert body == before

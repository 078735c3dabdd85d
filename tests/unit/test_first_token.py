"""Two streams joined: the first token is the prefill engine's, all others the decode engine's."""

import json
from typing import Any

import pytest

from dynamo_lite.forward.first_token import FirstTokenMerge

Event = dict[str, Any]


def text(value: str, reason: str | None = None, index: int = 0) -> Event:
    return {"id": "x", "choices": [{"index": index, "text": value, "finish_reason": reason}]}


def delta(reason: str | None = None, **fields: Any) -> Event:
    return {"id": "x", "choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def usage(tokens: int) -> Event:
    return {"id": "x", "choices": [], "usage": {"completion_tokens": tokens}}


def stream(*events: Event) -> bytes:
    parts = [json.dumps(event) for event in events] + ["[DONE]"]
    return "".join(f"data: {part}\n\n" for part in parts).encode()


def merged(prefill: list[Event], decode: list[Event]) -> list[Any]:
    """The events that the client gets."""
    merge, shown = FirstTokenMerge(), b""
    for events, change in ((prefill, merge.from_prefill), (decode, merge.from_decode)):
        shown += b"".join(change(part + b"\n\n") for part in stream(*events).split(b"\n\n")[:-1])
    payloads = [line[6:] for line in shown.split(b"\n\n")[:-1]]
    assert payloads.pop() == b"[DONE]"
    return [json.loads(payload) for payload in payloads]


def choices(events: list[Any], index: int = 0) -> list[Any]:
    return [one for event in events for one in event["choices"] if one["index"] == index]


def texts(events: list[Any], index: int = 0) -> list[str]:
    found = choices(events, index)
    return [one["text"] if "text" in one else one["delta"].get("content", "") for one in found]


def reasons(events: list[Any], index: int = 0) -> list[str]:
    return [one["finish_reason"] for one in choices(events, index) if one["finish_reason"]]


ROLE = delta(role="assistant", content="")
SHOWN_ROLE = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ([text("a", "length")], [text("a"), text("b"), text("c", "stop")], ["a", "b", "c"]),
        # A first chunk of several tokens, one that is also the last, or both.
        ([text("a", "length")], [text("abc"), text("d", "stop")], ["a", "bc", "d"]),
        ([text("a", "length")], [text("abc", "stop")], ["a", "bc"]),
        ([text("a", "length")], [text("a", "stop")], ["a", ""]),
        # After a first token without text, a chunk of two tokens is whole.
        ([text("", "length")], [text("ab"), text("c", "stop")], ["", "ab", "c"]),
        # Engines that sample may differ; two first tokens would be one too many.
        ([text("a", "length")], [text("x"), text("b", "stop")], ["a", "b"]),
    ],
)
def test_what_goes_beyond_the_first_token_is_shown(
    prefill: list[Event], decode: list[Event], expected: list[str]
):
    events = merged(prefill, decode)
    assert (texts(events), reasons(events)) == (expected, ["stop"])


def test_log_probabilities_of_the_first_token_are_shown_once():
    """Also where the answer ends with it."""
    one, both = text("a", "length"), text("a", "length")
    for event in (one, both):
        event["choices"][0]["logprobs"] = {"tokens": ["a"], "token_logprobs": [-0.5]}
    shown = [one.get("logprobs") for one in choices(merged([one], [both]))]
    assert shown == [{"tokens": ["a"], "token_logprobs": [-0.5]}, None]


def test_log_probabilities_of_a_first_token_without_text_are_shown_once():
    first, again = delta("length", content=""), delta(content="")
    for event in (first, again):
        event["choices"][0]["logprobs"] = {"content": [{"token": "\ufffd", "logprob": -0.5}]}
    rest = [ROLE, again, delta("stop", content="é")]
    shown = [one.get("logprobs") for one in choices(merged([ROLE, first], rest))]
    assert [one for one in shown if one] == [first["choices"][0]["logprobs"]]


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ([ROLE, delta("length", content="a")], [ROLE, delta(content="a"), delta("stop")], "a"),
        ([ROLE, delta("length", content="")], [ROLE, delta("stop", content="ab")], "ab"),
        # A decode engine holds back what could begin a stop string; the prefill engine has ended.
        (
            [text("Hello", "length")],
            [text(""), text("Hel"), text("lo wor"), text("ld", "stop")],
            "Hello world",
        ),
        # A character that was shown in part is shown whole.
        ([text("\ufffd", "length")], [text("é"), text("b", "stop")], "\ufffdéb"),
        ([text("\ufffd", "length")], [text(""), text("é"), text("b", "stop")], "\ufffdéb"),
        # Of several tokens that begin with another one only the first is removed. The chunk does
        # not say where it ends: at the end of the first word.
        (
            [text(" Paris", "length")],
            [text(" London is the"), text(" capital", "stop")],
            " Paris is the capital",
        ),
        (
            [ROLE, delta("length", content="Yes")],
            [ROLE, delta("stop", content="No, never")],
            "Yes never",
        ),
    ],
)
def test_the_text_is_that_of_one_answer(prefill: list[Event], decode: list[Event], expected: str):
    events = merged(prefill, decode)
    assert ("".join(texts(events)), reasons(events)) == (expected, ["stop"])
    roles = [one["delta"].get("role") for one in choices(events) if "delta" in one]
    assert roles.count("assistant") == prefill.count(ROLE)


def test_a_first_token_that_is_the_last_ends_with_the_decode_engine():
    for first in (text("", "stop"), text("a", "length")):
        events = merged([first, usage(1)], [first, usage(1)])
        assert "".join(texts(events)) == first["choices"][0]["text"]
        assert reasons(events) == [first["choices"][0]["finish_reason"]]
        assert events[-1]["usage"]["completion_tokens"] == 1


def test_each_choice_has_a_first_token_and_an_end():
    first = [text("p", "length", 1), text("a", "length"), text("", "stop", 2)]
    rest = [text("a"), text("b"), text("p", index=1), text("q", "stop", 1), text("", "stop", 2)]
    events = merged(first, [*rest, text("c", "stop")])
    assert [texts(events, n) for n in range(3)] == [["a", "b", "c"], ["p", "q"], ["", ""]]
    assert [reasons(events, n) for n in range(3)] == [["stop"]] * 3


@pytest.mark.parametrize(
    ("first", "rest", "expected"),
    [
        (
            {"reasoning": "r"},
            [{"reasoning": "r"}, {"content": "a"}],
            [{"reasoning": "r"}, {"content": "a"}],
        ),
        # A reasoning parser takes the mark of a thought, and sends nothing for it.
        (
            {},
            [{"reasoning": "r"}, {"reasoning": "s"}, {"content": "a"}],
            [{}, {"reasoning": "r"}, {"reasoning": "s"}, {"content": "a"}],
        ),
        # A first chunk may go on in another field.
        (
            {"reasoning": "r"},
            [{"reasoning": "r", "content": "a"}, {"content": "b"}],
            [{"reasoning": "r"}, {"content": "a"}, {"content": "b"}],
        ),
    ],
)
def test_all_that_goes_beyond_the_first_delta_is_shown(
    first: dict[str, Any], rest: list[dict[str, Any]], expected: list[dict[str, Any]]
):
    decode = [ROLE, *(delta(**fields) for fields in rest), delta("stop", content="")]
    events = merged([ROLE, delta("length", **first)], decode)
    shown = [one["delta"] for one in choices(events)]
    assert shown == [SHOWN_ROLE, *expected, {"content": ""}]


def test_usage_is_the_decode_engines():
    events = merged([text("a", "length"), usage(1)], [text("a"), text("b", "stop"), usage(2)])
    assert [e["usage"]["completion_tokens"] for e in events if e.get("usage")] == [2]


def test_errors_are_shown():
    failed: Event = {"error": {"message": "x"}}
    merge = FirstTokenMerge()
    merge.from_prefill(stream(text("a", "length")))
    assert json.loads(merge.from_decode(stream(failed)).split(b"\n\n")[0][6:]) == failed

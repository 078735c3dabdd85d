"""Two streams joined: the first token is the prefill engine's, all others the decode engine's."""

import json
from typing import Any

import pytest

from dynamo_lite.forward.first_token import FirstTokenMerge

Event = dict[str, Any]


def text(index: int, value: str, reason: str | None = None, name: str = "x") -> Event:
    return {"id": name, "choices": [{"index": index, "text": value, "finish_reason": reason}]}


def delta(index: int, reason: str | None = None, **fields: Any) -> Event:
    return {"id": "x", "choices": [{"index": index, "delta": fields, "finish_reason": reason}]}


def usage(tokens: int, cached: int | None = None) -> Event:
    found: dict[str, Any] = {"completion_tokens": tokens}
    if cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"id": "x", "choices": [], "usage": found}


def stream(*events: Event) -> bytes:
    parts = [json.dumps(event) for event in events] + ["[DONE]"]
    return "".join(f"data: {part}\n\n" for part in parts).encode()


def merged(prefill: bytes, decode: bytes, limit: int | None = None) -> tuple[list[Any], bool]:
    """The events that the client gets, and whether the decode engine was not needed."""
    merge = FirstTokenMerge(limit)
    shown = b"".join(merge.from_prefill(part + b"\n\n") for part in prefill.split(b"\n\n")[:-1])
    over = merge.over
    if over:
        shown += merge.end()
    else:
        shown += b"".join(merge.from_decode(part + b"\n\n") for part in decode.split(b"\n\n")[:-1])
    payloads = [line[6:] for line in shown.split(b"\n\n")[:-1]]
    assert payloads.pop() == b"[DONE]"
    return [json.loads(payload) for payload in payloads], over


def texts(events: list[Any], index: int = 0) -> list[str]:
    choices = [choice for event in events for choice in event["choices"]]
    return [
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
        if choice["index"] == index
    ]


def reasons(events: list[Any], index: int = 0) -> list[str]:
    choices = [choice for event in events for choice in event["choices"]]
    return [c["finish_reason"] for c in choices if c["index"] == index and c["finish_reason"]]


def test_completions():
    events, over = merged(
        stream(text(0, "a", "length")),
        stream(text(0, "a"), text(0, "b"), text(0, "c", "stop")),
    )
    assert (texts(events), reasons(events), over) == (["a", "b", "c"], ["stop"], False)


def test_the_role_is_no_token():
    events, _ = merged(
        stream(delta(0, role="assistant", content=""), delta(0, "length", content="a")),
        stream(
            delta(0, role="assistant", content=""),
            delta(0, content="a"),
            delta(0, content="b"),
            delta(0, "stop", content=""),
        ),
    )
    assert "".join(texts(events)) == "ab"
    assert [e["choices"][0]["delta"].get("role") for e in events].count("assistant") == 1
    assert reasons(events) == ["stop"]


def test_reasoning_and_tool_calls_are_tokens():
    call = [{"index": 0, "function": {"arguments": "{"}}]
    events, _ = merged(
        stream(delta(0, role="assistant"), delta(0, reasoning="r", reason="length")),
        stream(
            delta(0, role="assistant"),
            delta(0, reasoning="r"),
            delta(0, "stop", tool_calls=call),
        ),
    )
    assert [e["choices"][0]["delta"] for e in events] == [
        {"role": "assistant"},
        {"reasoning": "r"},
        {"tool_calls": call},
    ]


def test_an_end_of_the_sequence_first_ends_the_answer():
    events, over = merged(stream(text(0, "", "stop"), usage(1)), b"")
    assert (texts(events), reasons(events), over) == ([""], ["stop"], True)
    assert events[-1]["usage"]["completion_tokens"] == 1


def test_a_limit_of_one_token_ends_the_answer():
    events, over = merged(stream(text(0, "a", "length")), b"", limit=1)
    assert (texts(events), reasons(events), over) == (["a"], ["length"], True)


def test_each_choice_has_a_first_token():
    events, over = merged(
        stream(text(1, "p", "length"), text(0, "a", "length")),
        stream(
            text(0, "a"), text(0, "b"), text(1, "p"), text(1, "q", "stop"), text(0, "c", "stop")
        ),
    )
    assert texts(events, 0) == ["a", "b", "c"] and texts(events, 1) == ["p", "q"]
    assert (reasons(events, 0), reasons(events, 1), over) == (["stop"], ["stop"], False)


def test_one_choice_ends_and_another_goes_on():
    events, over = merged(
        stream(text(0, "", "stop"), text(1, "p", "length")),
        stream(text(0, "", "stop"), text(1, "p"), text(1, "q", "length")),
    )
    assert (reasons(events, 0), texts(events, 1), over) == (["stop"], ["p", "q"], False)
    assert texts(events, 0) == [""]


def test_a_first_chunk_of_several_tokens_loses_none():
    events, _ = merged(stream(text(0, "a", "length")), stream(text(0, "abc"), text(0, "d", "stop")))
    assert texts(events) == ["a", "bc", "d"]
    events, _ = merged(stream(text(0, "a", "length")), stream(text(0, "abc", "stop")))
    assert (texts(events), reasons(events)) == (["a", "bc"], ["stop"])


def test_a_first_chunk_that_is_also_the_last_keeps_its_reason():
    events, _ = merged(stream(text(0, "a", "length")), stream(text(0, "a", "stop")))
    assert (texts(events), reasons(events)) == (["a", ""], ["stop"])


@pytest.mark.parametrize("cached", [None, 3])
def test_usage_is_the_decode_engines_and_its_cached_tokens_the_prefill_engines(
    cached: int | None,
):
    events, _ = merged(
        stream(text(0, "a", "length"), usage(1, cached)),
        stream(text(0, "a"), text(0, "b", "stop"), usage(2, 5)),
    )
    assert [e["usage"] for e in events if e.get("usage")] == [
        {
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 5 if cached is None else cached},
        }
    ]


def test_all_chunks_have_one_id():
    events, _ = merged(
        stream(text(0, "a", "length", name="p")),
        stream(text(0, "a", name="d"), text(0, "b", name="d"), text(0, "c", "stop", name="d")),
    )
    assert {event["id"] for event in events} == {"p"}


def test_errors_are_shown():
    failed: Event = {"error": {"message": "x"}}
    merge = FirstTokenMerge(None)
    merge.from_prefill(stream(text(0, "a", "length")))
    assert json.loads(merge.from_decode(stream(failed)).split(b"\n\n")[0][6:]) == failed

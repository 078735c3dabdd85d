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


def deltas(events: list[Any]) -> list[Any]:
    return [choice["delta"] for event in events for choice in event["choices"]]


ROLE = delta(0, role="assistant", content="")
SHOWN_ROLE = {"role": "assistant", "content": ""}


def test_a_first_token_that_shows_nothing_hides_nothing_of_the_second_one():
    """A reasoning parser takes the mark of a thought, and sends nothing for it."""
    events, _ = merged(
        stream(ROLE, delta(0, "length")),
        stream(
            ROLE, delta(0, reasoning="r"), delta(0, reasoning="s"), delta(0, "stop", content="a")
        ),
    )
    assert deltas(events) == [
        SHOWN_ROLE,
        {},
        {"reasoning": "r"},
        {"reasoning": "s"},
        {"content": "a"},
    ]
    assert reasons(events) == ["stop"]


def test_a_first_token_of_a_tool_call_that_shows_nothing_hides_no_name():
    name = [{"index": 0, "id": "d", "type": "function", "function": {"name": "f"}}]
    arguments = [{"index": 0, "function": {"arguments": "{}"}}]
    events, _ = merged(
        stream(ROLE, delta(0, "length")),
        stream(ROLE, delta(0, tool_calls=name), delta(0, "tool_calls", tool_calls=arguments)),
    )
    assert deltas(events)[2:] == [{"tool_calls": name}, {"tool_calls": arguments}]


def test_after_a_first_token_without_text_a_chunk_of_two_tokens_is_whole():
    events, _ = merged(stream(text(0, "", "length")), stream(text(0, "ab"), text(0, "c", "stop")))
    assert texts(events) == ["", "ab", "c"]
    events, _ = merged(
        stream(ROLE, delta(0, "length", content="")),
        stream(ROLE, delta(0, content="ab"), delta(0, "stop", content="c")),
    )
    assert "".join(texts(events)) == "abc"


def test_the_tool_call_that_was_shown_keeps_its_id_and_gets_the_rest_of_its_arguments():
    """Each engine draws an id of its own."""

    def call(name: str, arguments: str) -> list[Any]:
        function = {"name": "f", "arguments": arguments}
        return [{"index": 0, "id": name, "type": "function", "function": function}]

    more = [{"index": 0, "function": {"arguments": "1}"}}]
    for first, rest in (("", [{"index": 0, "function": {"arguments": "{"}}]), ("{", None)):
        events, _ = merged(
            stream(ROLE, delta(0, "length", tool_calls=call("p", first))),
            stream(
                ROLE,
                delta(0, tool_calls=call("d", "{")),
                delta(0, "tool_calls", tool_calls=more),
            ),
        )
        expected = [{"tool_calls": call("p", first)}, {"tool_calls": rest}, {"tool_calls": more}]
        assert deltas(events)[1:] == [one for one in expected if one["tool_calls"] is not None]


def test_a_second_tool_call_in_the_first_chunk_is_shown():
    calls = [{"index": n, "id": f"d{n}", "function": {"name": "f"}} for n in range(2)]
    events, _ = merged(
        stream(ROLE, delta(0, "length", tool_calls=calls[:1])),
        stream(ROLE, delta(0, tool_calls=calls), delta(0, "tool_calls", content="")),
    )
    assert deltas(events)[1:3] == [{"tool_calls": calls[:1]}, {"tool_calls": calls[1:]}]


def test_a_first_chunk_may_go_on_in_another_field():
    events, _ = merged(
        stream(ROLE, delta(0, "length", reasoning="r")),
        stream(ROLE, delta(0, reasoning="r", content="a"), delta(0, "stop", content="b")),
    )
    assert deltas(events)[1:] == [{"reasoning": "r"}, {"content": "a"}, {"content": "b"}]


def test_text_that_is_held_back_is_not_shown_twice():
    """A decode engine holds back what could begin a stop string; the prefill engine has ended."""
    events, _ = merged(
        stream(text(0, "Hello", "length")),
        stream(text(0, ""), text(0, "Hel"), text(0, "lo wor"), text(0, "ld", "stop")),
    )
    assert "".join(texts(events)) == "Hello world"


def test_a_character_that_was_shown_in_part_is_shown_whole():
    for first in (text(0, ""), None):
        decode = [text(0, "é"), text(0, "b", "stop")]
        events, _ = merged(
            stream(text(0, "\ufffd", "length")),
            stream(*([first] if first else []), *decode),
        )
        assert "".join(texts(events)) == "\ufffdéb"


def test_another_first_token_is_removed():
    """Engines that sample may differ; two first tokens would be one too many."""
    events, _ = merged(stream(text(0, "a", "length")), stream(text(0, "x"), text(0, "b", "stop")))
    assert texts(events) == ["a", "b"]


def test_of_several_tokens_that_begin_with_another_one_only_the_first_is_removed():
    """The chunk does not say where its first token ends: at the end of its first word."""
    events, _ = merged(
        stream(text(0, " Paris", "length")),
        stream(text(0, " London is the"), text(0, " capital", "stop")),
    )
    assert "".join(texts(events)) == " Paris is the capital"
    events, _ = merged(
        stream(ROLE, delta(0, "length", content="Yes")),
        stream(ROLE, delta(0, "stop", content="No, never")),
    )
    assert "".join(texts(events)) == "Yes never" and reasons(events) == ["stop"]


def test_where_a_chunk_says_its_tokens_exactly_the_first_is_removed():
    def tokens(*found: str) -> Event:
        chunk = text(0, "".join(found))
        chunk["choices"][0]["logprobs"] = {"tokens": list(found)}
        return chunk

    def chat_tokens(*found: str) -> Event:
        chunk = delta(0, content="".join(found))
        chunk["choices"][0]["logprobs"] = {"content": [{"token": one} for one in found]}
        return chunk

    for one, first in (
        (tokens, text(0, "a", "length")),
        (chat_tokens, delta(0, "length", content="a")),
    ):
        for found, left in ((("x", "yz"), "yz"), ((" \n x",), ""), (("x y", " z"), " z")):
            events, _ = merged(stream(first), stream(one(*found), text(0, "b", "stop")))
            assert "".join(texts(events)) == f"a{left}b"


def test_after_a_part_of_the_first_token_a_different_rest_is_shown():
    """The decode engine's first token is "Hel"; what follows is not the first token."""
    events, _ = merged(
        stream(text(0, "Hello", "length")),
        stream(text(0, "Hel"), text(0, "p"), text(0, " me", "stop")),
    )
    assert "".join(texts(events)) == "Hellop me"


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

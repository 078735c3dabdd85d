"""What counts as the beginning of a stream, before its first output."""

import json

import pytest

from dynamo_lite.forward.events import LIMIT_BYTES, Beginning

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
START = b'event: message_start\ndata: {"type":"message_start","message":{"role":"x"}}\n\n'


def chunk(delta: dict[str, object], **choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta, **choice}]}).encode() + b"\n\n"


@pytest.mark.parametrize("event", [ROLE, ROLE + ROLE, CREATED, CREATED + PROGRESS, START])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_without_output_are_held_back(event: bytes, line_end: bytes):
    event = event.replace(b"\n", line_end)
    for cut in range(1, len(event)):
        beginning = Beginning()
        assert not beginning.over(event[:cut]) and not beginning.over(event[cut:])
        assert beginning.over(b'data: {"x":1}\n\n') and beginning.error is None
        assert beginning.data == event + b'data: {"x":1}\n\n'


@pytest.mark.parametrize(
    "event",
    [
        chunk({"role": "assistant", "content": "a"}),
        chunk({"role": "assistant", "tool_calls": [{"index": 0}]}),
        chunk({"role": "assistant", "content": ""}, finish_reason="stop"),
        chunk({"role": "assistant", "content": ""}, logprobs={"content": []}),
        chunk({"content": ""}),
        b'data: {"choices":[{"index":0,"text":"\\"role\\""}]}\n\n',
        b'data: {"choices":[],"usage":{"role":1}}\n\n',
        b'data: "role"\n\n',
        b"data: [DONE]\n\n",
        b": still there\n\n",
    ],
)
def test_anything_else_is_output(event: bytes):
    beginning = Beginning()
    assert beginning.over(ROLE + event) and beginning.error is None


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error": {"code": 500}}\n\n',
        b"data: {'error': 1}\n\n",
        b'event: error\ndata: {"type":"error","error":{}}\n\n',
        b'event: unknown\ndata: {"error":{}}\n\n',
    ],
)
@pytest.mark.parametrize("before", [b"", ROLE, CREATED + PROGRESS, START])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_an_error_in_place_of_the_output_is_seen(before: bytes, event: bytes, line_end: bytes):
    beginning = Beginning()
    assert beginning.over((before + event).replace(b"\n", line_end))
    assert beginning.error is not None
    late = Beginning()
    whole = before + chunk({"content": "a"}) + event
    assert late.over(whole.replace(b"\n", line_end)) and late.error is None


def test_what_is_held_back_is_bounded():
    beginning = Beginning()
    assert not beginning.over(b'data: {"role":"' + b"x" * (LIMIT_BYTES - 100))
    assert beginning.over(b"x" * 200)


def test_a_stream_with_lines_that_are_not_known_is_not_held_back():
    assert Beginning().over(ROLE.replace(b"\n", b"\r"))
    beginning = Beginning()
    assert not beginning.over(b"data: 1\r") and beginning.over(b"data: 2\r")

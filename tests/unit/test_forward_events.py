"""Streams of engines, cut into whole events; the errors among them, and those before the first
output."""

import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.forward.client import ParamsBlanker
from dynamo_lite.forward.events import (
    EVENT_ENDS,
    LIMIT_BYTES,
    EventReader,
    error_of,
    split,
)
from dynamo_lite.forward.failures import LegFailed

STREAM = b"data: a\n\ndata: b\nid: 1\n\ndata: \n c\n\n: d\n\nrest"
CRLF = STREAM.replace(b"\n", b"\r\n")
#: Each event ends in another way.
MIXED = b"data: a\r\n\ndata: b\n\r\n: c\r\n\r\ndata: d\r\nid: 1\n\nrest"


def whole(data: bytes) -> bytes:
    """The whole events at the beginning of these bytes."""
    return data[: max((found.end() for found in re.finditer(rb"\n\r?\n", data)), default=0)]


@pytest.mark.parametrize("stream", [STREAM, CRLF, MIXED])
async def test_wherever_a_stream_is_cut_only_whole_events_come_and_nothing_is_lost(stream: bytes):
    every = tuple(range(1, len(stream)))
    for cuts in (every, *itertools.combinations(every, 1), *itertools.combinations(every, 2)):
        pieces = [stream[at:end] for at, end in itertools.pairwise((0, *cuts, len(stream)))]
        answer: Any = Pieces(*pieces)
        reader, shown = EventReader(answer), b""
        while events := await reader.next():
            shown += events
            came = b"".join(pieces[: len(pieces) - len(answer.left) + 1])
            # At the end the rest comes, too.
            assert shown == (whole(came) if events.endswith(EVENT_ENDS) else stream), cuts
        assert shown == stream
    assert [one for one in split(whole(stream)) if one] == split(stream)[:-1]


def test_transfer_parameters_are_blanked_wherever_an_answer_is_cut():
    kept = (
        rb'{"a": "\"kv_transfer_params\": {1}", "kv_transfer_params": null, "ec_transfer_params":{'
    )
    inside = rb'"h": "}\"}\\", "x": {"y": [{}]}'
    answer = kept + inside + b'}, "z":[{"kv_transfer_params" : {"a":1}}]}'
    wanted = kept + b" " * len(inside) + b'}, "z":[{"kv_transfer_params" : {     }}]}'
    every = tuple(range(1, len(answer)))
    for cuts in (every, *itertools.combinations(every, 2)):
        blanker, pieces = ParamsBlanker(), itertools.pairwise((0, *cuts, len(answer)))
        assert b"".join(blanker.feed(answer[begin:end]) for begin, end in pieces) == wanted, cuts


def test_errors_are_known_in_all_their_forms():
    for error in (b'data: {"error": 1}', b"data:{'error': 1}", b'id: 1\ndata: {"error": 1}'):
        assert error_of(error) == error.partition(b"data:")[2].strip()
    for end in (b"\n", b"\r\n"):
        named = b"event: error" + end + b'data: {"type": "error"}' + end
        assert error_of(named) == b'{"type": "error"}'
    for other in (b'data: {"choices": [{"text": "{\\"error\\""}]}', b"data: [DONE]", b": x", b""):
        assert error_of(other) is None


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
COMMENTS = b": keep-alive\n\nretry: 5\nid: 1\n\n"
START = b'event: message_start\ndata: {"type":"message_start","message":{"role":"x"}}\n\n'


def chunk(delta: dict[str, object], **choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta, **choice}]}).encode() + b"\n\n"


class Pieces:
    """An answer of which these pieces come, and then nothing more."""

    is_stream = True

    def __init__(self, *pieces: bytes):
        self.left = [*pieces, b""]
        self.engine: Any = SimpleNamespace(name="e")
        self.leg = "decode"

    async def read_some(self) -> bytes:
        return self.left.pop(0) if self.left else b""


async def held_back(*pieces: bytes) -> tuple[bytes, int]:
    """What is known with the first output, and how many pieces have not come by then."""
    answer: Any = Pieces(*pieces)
    reader = EventReader(answer)
    return await reader.until_output() + reader.rest(), len(answer.left) - 1


@pytest.mark.parametrize("event", [ROLE + COMMENTS + ROLE, CREATED + PROGRESS, COMMENTS + START])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_events_without_output_are_held_back(event: bytes, line_end: bytes):
    event, output = event.replace(b"\n", line_end), b'data: {"x":1}\n\n'
    for cut in range(1, len(event)):
        shown = await held_back(event[:cut], event[cut:], output, b"more")
        assert shown == (event + output, 1)


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
        b'data: {"role":\n\n',
        b"data: [DONE]\n\n",
    ],
)
async def test_anything_else_is_output(event: bytes):
    assert await held_back(ROLE + event, b"more") == (ROLE + event, 1)


@pytest.mark.parametrize("before", [b"", ROLE, CREATED + PROGRESS, START])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_an_error_in_place_of_the_output_is_seen(before: bytes, line_end: bytes):
    event = b'event: error\ndata: {"type":"error","error":{}}\n\n'
    with pytest.raises(LegFailed, match="status"):
        await held_back((before + event).replace(b"\n", line_end))
    after = (before + chunk({"content": "a"}) + event).replace(b"\n", line_end)
    assert await held_back(after) == (after, 0)


async def test_what_is_held_back_is_bounded():
    long = b'data: {"type":"message_start","x":"' + b"x" * (LIMIT_BYTES - 100) + b'"}\n\n'
    assert await held_back(long, ROLE, b"more") == (long + ROLE, 1)

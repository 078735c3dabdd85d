"""Streams of engines, cut into whole events, and the errors among them."""

import itertools
import re

import pytest

from dynamo_lite.forward.events import EventCutter, ends_event, error_of, split

STREAM = b"data: a\n\ndata: b\nid: 1\n\ndata: \n c\n\n: d\n\nrest"
CRLF = STREAM.replace(b"\n", b"\r\n")
#: Each event ends in another way.
MIXED = b"data: a\r\n\ndata: b\n\r\n: c\r\n\r\ndata: d\r\nid: 1\n\nrest"


def whole(data: bytes) -> bytes:
    """The whole events at the beginning of these bytes."""
    return data[: max((found.end() for found in re.finditer(rb"\n\r?\n", data)), default=0)]


@pytest.mark.parametrize("stream", [STREAM, CRLF, MIXED])
@pytest.mark.parametrize("count", [1, 2])
def test_wherever_a_stream_is_cut_only_whole_events_come_and_nothing_is_lost(
    count: int, stream: bytes
):
    for cuts in itertools.combinations(range(1, len(stream)), count):
        cutter, came, shown = EventCutter(), b"", b""
        for begin, end in itertools.pairwise((0, *cuts, len(stream))):
            came += stream[begin:end]
            shown += cutter.feed(stream[begin:end])
            assert shown == whole(came), cuts
        assert shown + cutter.flush() == stream
        assert cutter.flush() == b""


@pytest.mark.parametrize("stream", [STREAM, CRLF, MIXED])
def test_a_stream_of_single_bytes_comes_event_by_event(stream: bytes):
    cutter = EventCutter()
    events = [found for byte in stream if (found := cutter.feed(bytes([byte])))]
    assert len(events) == 4 and all(map(ends_event, events))
    assert b"".join(events) == whole(stream) and not ends_event(cutter.flush())
    assert [split(event) for event in events] == [[one, b""] for one in split(stream)[:-1]]


def test_an_incomplete_event_has_a_size():
    cutter = EventCutter()
    for _ in range(5):
        assert cutter.feed(b"12345678") == b"" and cutter.feed(b"\n") == b""
        assert cutter.size == 9
        assert cutter.feed(b"\n12") == b"12345678\n\n" and cutter.size == 2
        assert cutter.feed(b"\n\n") == b"12\n\n" and cutter.size == 0


def test_errors_are_known_in_all_their_forms():
    for error in (b'data: {"error": 1}', b"data:{'error': 1}", b'id: 1\ndata: {"error": 1}'):
        assert error_of(error) == error.partition(b"data:")[2].strip()
    for end in (b"\n", b"\r\n"):
        named = b"event: error" + end + b'data: {"type": "error"}' + end
        assert error_of(named) == b'{"type": "error"}'
    for other in (b'data: {"choices": [{"text": "{\\"error\\""}]}', b"data: [DONE]", b": x", b""):
        assert error_of(other) is None

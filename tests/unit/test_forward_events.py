"""Streams of engines, cut into whole events, and the errors among them."""

import itertools

import pytest

from dynamo_lite.forward import engine_answer
from dynamo_lite.forward.engine_answer import TooLarge
from dynamo_lite.forward.events import error_of
from dynamo_lite.forward.rewriting import EventCutter

STREAM = b"data: a\n\ndata: b\nid: 1\n\ndata: \n c\n\n: d\n\nrest"


@pytest.mark.parametrize("count", [1, 2])
def test_wherever_a_stream_is_cut_only_whole_events_come_and_nothing_is_lost(count: int):
    for cuts in itertools.combinations(range(1, len(STREAM)), count):
        cutter, came, shown = EventCutter(), b"", b""
        for begin, end in itertools.pairwise((0, *cuts, len(STREAM))):
            came += STREAM[begin:end]
            shown += cutter.feed(STREAM[begin:end])
            assert shown == came[: came.rfind(b"\n\n") + 2 if b"\n\n" in came else 0], cuts
        assert shown + cutter.flush() == STREAM
        assert cutter.flush() == b""


def test_an_event_has_a_limit_and_a_stream_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_answer, "MAX_WHOLE_BYTES", 10)
    cutter = EventCutter()
    for _ in range(5):
        assert cutter.feed(b"12345678") == b"" and cutter.feed(b"\n") == b""
        assert cutter.feed(b"\n12") == b"12345678\n\n"
        assert cutter.feed(b"\n\n") == b"12\n\n"
    cutter.feed(b"1234567890")
    with pytest.raises(TooLarge):
        cutter.feed(b"1")


def test_errors_are_known_in_all_their_forms():
    for error in (b'data: {"error": 1}', b"data:{'error': 1}", b'id: 1\ndata: {"error": 1}'):
        assert error_of(error) == error.partition(b"data:")[2].strip()
    assert error_of(b'event: error\ndata: {"type": "error"}') == b'{"type": "error"}'
    for other in (b'data: {"choices": [{"text": "{\\"error\\""}]}', b"data: [DONE]", b": x", b""):
        assert error_of(other) is None

"""Valid and invalid `traceparent` headers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.protocol.trace import TraceContext, new_trace, trace_of, traced

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
    ],
)
def test_a_context_is_read(text: str, sampled: bool):
    found = trace_of({"traceparent": text})
    assert found == TraceContext(TRACE, SPAN, sampled)
    assert traced({"traceparent": text}) == (found if sampled else None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 1000}",
    ],
)
def test_what_is_none_is_dropped(text: str):
    assert trace_of({"traceparent": text}) is None


def test_no_header_is_no_context():
    for headers in (None, {}, {"tracestate": "a=1"}, {"t": "0"}):
        assert trace_of(headers) is None and traced(headers) is None


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.?"))
def test_whatever_is_read_is_valid(text: str):
    found = trace_of({"traceparent": text})
    if found is not None:
        assert int(found.trace_id, 16) and int(found.span_id, 16)
        assert (len(found.trace_id), len(found.span_id)) == (32, 16)
        assert trace_of(found.headers()) == found


def test_a_child_is_another_span_of_the_same_trace():
    root = new_trace()
    child, other = root.child(), root.child()
    assert root.trace_id == child.trace_id == other.trace_id
    assert len({root.span_id, child.span_id, other.span_id}) == 3
    assert traced(child.headers()) == child
    assert not TraceContext(TRACE, SPAN, sampled=False).child().sampled
    assert new_trace().trace_id != root.trace_id

"""Limits on what is in flight, and the counts that they are about."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.protocol.options import AdmissionOptions
from dynamo_lite.request_plane.admission import MAX_HELD_BYTES, Admission


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "answered", "leave"]),
            st.sampled_from("abcdef"),
            st.integers(0, 120),
            st.booleans(),
        )
    )
)
def test_counts_are_those_of_what_is_in_flight(events: list[tuple[str, str, int, bool]]):
    """A prompt waits until its first token or its end. One beyond the limit is taken when no other
    waits; a promised one always is."""
    admission = Admission(AdmissionOptions(max_in_flight_requests=4, max_queued_tokens=100))
    waiting: dict[str, int] = {}
    keys: set[str] = set()
    for event, key, size, promised in events:
        match event:
            case "enter" if key not in keys:
                full = len(keys) >= 4 or (waiting and sum(waiting.values()) + size > 100)
                verdict = admission.enter(key, size, promised=promised)
                assert (verdict is not None) == bool(full and not promised)
                if verdict is None:
                    keys.add(key)
                    waiting[key] = size
            case "answered":
                admission.answered(key)
                waiting.pop(key, None)
            case "leave":
                admission.leave(key)
                keys.discard(key)
                waiting.pop(key, None)
        assert (admission.in_flight, admission.waiting_tokens) == (len(keys), sum(waiting.values()))


def test_media_are_held_until_their_request_ends():
    """A first token frees none: a migration needs them. A single larger one is admitted."""
    admission = Admission()
    assert admission.enter("huge", 1, input_bytes=MAX_HELD_BYTES + 1) is None
    assert "media" in (admission.enter("more", 1, input_bytes=1) or "")
    assert admission.enter("moved", 1, input_bytes=1, promised=True) is None
    assert admission.enter("text", 1) is None
    admission.answered("huge")
    assert admission.enter("more", 1, input_bytes=1) is not None
    admission.leave("huge")
    assert admission.enter("more", 1, input_bytes=MAX_HELD_BYTES - 1) is None
    assert admission.in_flight == 3

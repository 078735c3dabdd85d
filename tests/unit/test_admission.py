"""Limits on what is in flight, and the counts that they are about."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.request_plane.admission import Admission, Limits


def test_requests_in_flight_are_limited():
    admission = Admission(Limits(in_flight=2))
    for key in ("a", "b"):
        assert admission.enter(key, 1) is None
    refused = admission.enter("c", 1)
    assert refused == "2 of at most 2 requests are in flight"
    admission.answered("a")
    assert admission.enter("c", 1) is not None
    admission.leave("a")
    assert admission.enter("c", 1) is None


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
    admission = Admission(Limits(in_flight=4, prompt_tokens=100))
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


def test_new_limits_hold_from_then_on():
    admission = Admission(Limits(in_flight=3, prompt_tokens=10))
    for key in ("a", "b"):
        assert admission.enter(key, 4) is None
    admission.limit(Limits(in_flight=1))
    assert admission.in_flight == 2
    admission.leave("a")
    assert admission.enter("c", 4) is not None
    admission.limit(Limits(in_flight=2))
    assert admission.enter("c", 100) is None

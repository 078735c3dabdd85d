"""Limits on the media of what is in flight; those on requests and tokens are the contract's."""

from dynamo_lite.request_plane.admission import MAX_HELD_BYTES, Admission


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

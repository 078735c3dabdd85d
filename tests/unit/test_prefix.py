import pytest

from dynamo_lite.policy.prefix import Compute, Read, Reason, read_or_compute


@pytest.mark.parametrize(
    ("held", "cached", "verdict"),
    [
        (0, 0, Compute(Reason.NOT_HELD)),
        (0, 64, Compute(Reason.NOT_HELD)),
        (128, 128, Compute(Reason.CACHED)),
        (128, 160, Compute(Reason.CACHED)),
        (128, 96, Compute(Reason.SHORT)),
        (128, 64, Read(64, Reason.LONG)),
        (128, 0, Read(128, Reason.LONG)),
    ],
)
def test_what_is_missing_is_read_when_it_is_much(held, cached, verdict):
    assert read_or_compute(held_tokens=held, cached_tokens=cached, min_read_tokens=64) == verdict

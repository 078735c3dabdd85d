import pytest

from dynamo_lite.policy.decision.prefix import Compute, PrefixReason, Read, read_or_compute


@pytest.mark.parametrize(
    ("held", "cached", "verdict"),
    [
        (0, 0, Compute(PrefixReason.NOT_HELD)),
        (0, 64, Compute(PrefixReason.NOT_HELD)),
        (128, 128, Compute(PrefixReason.CACHED)),
        (128, 160, Compute(PrefixReason.CACHED)),
        (128, 96, Compute(PrefixReason.SHORT)),
        (128, 64, Read(64, PrefixReason.LONG)),
        (128, 0, Read(128, PrefixReason.LONG)),
    ],
)
def test_what_is_missing_is_read_when_it_is_much(held, cached, verdict):
    assert read_or_compute(held_tokens=held, cached_tokens=cached, min_read_tokens=64) == verdict

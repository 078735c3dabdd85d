"""A hundred clusters with everything that goes wrong in them."""

import pytest

from tests.simulation.loop.loop import sweep
from tests.simulation.play import play, violated_lines


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_no_invariant_is_violated(first: int):
    bad: list[str] = []
    for seed in range(first, first + 10):
        violations = play(seed).violations
        bad += violated_lines(seed, violations[0]) if violations else []
    sweep()
    assert not bad, "\n".join(bad)

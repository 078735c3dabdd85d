"""Each safety is missed when it is taken away: the invariants can fail."""

import pytest

from dynamo_lite.simulation.loop.teardown import sweep
from dynamo_lite.simulation.mutants import MUTANTS
from dynamo_lite.simulation.play import play

#: Within so many seeds; most need ten, one needs a hundred.
BOUND = 1000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_safety_is_found(name: str):
    shipped = MUTANTS[name]()
    seed = next((seed for seed in range(BOUND) if play(seed, shipped=shipped).violations), None)
    sweep()
    assert seed is not None, f"{name} violates nothing in {BOUND} seeds"
    # The safety is all that the seed lacks.
    assert play(seed).violations == []

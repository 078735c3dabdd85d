"""Each safety is missed when it is taken away: the invariants can fail."""

import pytest

from tests.sim.known_seeds import finds, known_seeds
from tests.simulation.loop.loop import sweep
from tests.simulation.mutants import MUTANTS

KNOWN = known_seeds()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_safety_is_found(name: str):
    assert name in KNOWN, "no seed is known: `python -m tests.sim.known_seeds` searches for one"
    found = finds(name, KNOWN[name])
    sweep()
    assert found, f"seed {KNOWN[name]} does not find it: `python -m tests.sim.known_seeds`"

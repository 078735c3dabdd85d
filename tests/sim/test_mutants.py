"""Each safety is missed when it is taken away: the invariants can fail."""

from collections.abc import Iterable
from itertools import chain

import pytest

from dynamo_lite.simulation.loop.teardown import sweep
from dynamo_lite.simulation.mutants import MUTANTS, PLANNED_MUTANTS
from dynamo_lite.simulation.planner_draw import has_planner
from dynamo_lite.simulation.play import play

#: Each is found within this many seeds; most need ten, one needs hundreds.
BOUND = 1000
#: Seeds with a planner are one of ten, and slower.
PLANNER_BOUND = 2000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_safety_is_found(name: str):
    mutant = MUTANTS[name]
    planned = name in PLANNED_MUTANTS
    # Seeds with planners are slower, and have less of all else.
    bound = PLANNER_BOUND if planned else BOUND
    seeds: Iterable[int] = (seed for seed in range(bound) if has_planner(seed) is planned)
    if mutant.seed is not None:
        # If the known seed does not find it any more, another one will.
        seeds = chain([mutant.seed], seeds)

    def finds(seed: int) -> bool:
        violations = play(seed, shipped=mutant.parts()).violations
        return any(mutant.violates in violation for violation in violations)

    seed = next((seed for seed in seeds if finds(seed)), None)
    sweep()
    assert seed is not None, f"{name}: in no seed a violation says {mutant.violates!r}"
    # The safety is all that the seed lacks.
    assert play(seed).violations == []

"""Each safety is missed when it is taken away: the invariants can fail."""

from collections.abc import Iterable

import pytest

from dynamo_lite.simulation.loop.teardown import sweep
from dynamo_lite.simulation.mutants import MUTANTS
from dynamo_lite.simulation.planner_draw import has_planner
from dynamo_lite.simulation.planner_mutants import FOUND_BY, PLANNER_MUTANTS
from dynamo_lite.simulation.play import play

#: Each is found within this many seeds; most need ten, one needs a hundred.
BOUND = 1000
#: Seeds with a planner are one of ten, and slower.
PLANNER_BOUND = 2000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_safety_is_found(name: str):
    shipped = MUTANTS[name]()
    # Seeds with planners are slower, and have less of all else.
    seeds: Iterable[int] = (seed for seed in range(BOUND) if not has_planner(seed))
    if name in PLANNER_MUTANTS:
        # The one that is known to find it first: when it does not any more, another one will.
        known = FOUND_BY[name]
        seeds = (known, *(seed for seed in range(PLANNER_BOUND) if has_planner(seed)))
    seed = next((seed for seed in seeds if play(seed, shipped=shipped).violations), None)
    sweep()
    assert seed is not None, f"{name} violates nothing in these seeds"
    # The safety is all that the seed lacks.
    assert play(seed).violations == []

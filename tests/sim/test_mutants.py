"""Each safety is missed when it is taken away: the invariants can fail."""

from collections.abc import Iterable
from itertools import chain

import pytest

from dynamo_lite.simulation.loop.teardown import sweep
from dynamo_lite.simulation.mutants import FOUND_BY, MUTANTS, PLANNED_MUTANTS
from dynamo_lite.simulation.planner_draw import has_planner
from dynamo_lite.simulation.play import play

#: Each is found within this many seeds; most need ten, one needs hundreds.
BOUND = 1000
#: Seeds with a planner are one of ten, and slower.
PLANNER_BOUND = 2000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_safety_is_found(name: str):
    shipped = MUTANTS[name]()
    planned = name in PLANNED_MUTANTS
    # Seeds with planners are slower, and have less of all else.
    bound = PLANNER_BOUND if planned else BOUND
    seeds: Iterable[int] = (seed for seed in range(bound) if has_planner(seed) is planned)
    if name in FOUND_BY:
        # If the known seed does not find it any more, another one will.
        seeds = chain([FOUND_BY[name]], seeds)
    seed = next((seed for seed in seeds if play(seed, shipped=shipped).violations), None)
    sweep()
    assert seed is not None, f"{name} violates nothing in these seeds"
    # The safety is all that the seed lacks.
    assert play(seed).violations == []

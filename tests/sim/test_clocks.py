"""No process decides anything by comparing its wall clock with that of another host."""

from dataclasses import replace
from random import Random

import pytest

from tests.simulation.draw import draw
from tests.simulation.play import play_scenario
from tests.simulation.scenario import FaultKind

_DAY_S = 86400.0


@pytest.mark.parametrize("seed", range(10))
def test_what_the_wall_clocks_of_the_hosts_show_changes_nothing(seed: int):
    """Not one callback runs at another time: not for clocks that are wrong from the beginning,
    nor for those that are set while requests are under way."""
    # A planner takes the youngest of equally busy workers.
    drawn = replace(draw(seed), planner=None)
    faults = tuple(fault for fault in drawn.faults if fault.kind is not FaultKind.WALL_JUMP)
    right = replace(drawn, clock_skews=(), faults=faults)
    rng = Random(seed)
    wrong = tuple((slot, rng.uniform(-_DAY_S, _DAY_S)) for slot in drawn.slots)
    here, there = play_scenario(right), play_scenario(replace(right, clock_skews=wrong))
    assert here.violations == there.violations == []
    assert here.fingerprint == there.fingerprint
    assert here.counts == there.counts

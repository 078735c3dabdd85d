"""The search for the highest load that a server holds."""

import pytest

from benchmarks.ramp import TRIES, Ramp

FIRST, MOST, PRECISION = 2000.0, 1e6, 0.05


def searched(ramp: Ramp, holds: float) -> list[float]:
    """The loads that are offered to a server that holds so much."""
    offered: list[float] = []
    while ramp.load is not None:
        offered.append(ramp.load)
        ramp.note(held=ramp.load <= holds)
    return offered


@pytest.mark.parametrize("holds", [260.0, 1999.0, 2000.0, 11_800.0, 63_999.0, 900_000.0])
def test_it_ends_just_below_the_highest_load(holds: float):
    ramp = Ramp(FIRST, MOST, PRECISION)
    offered = searched(ramp, holds)
    assert holds / (1 + PRECISION) <= ramp.held <= holds
    assert len(offered) < 25


def test_a_load_that_does_not_hold_is_offered_again_and_doubled_when_it_holds_then():
    ramp = Ramp(FIRST, MOST, PRECISION)
    ramp.note(held=True)
    for _ in range(TRIES - 1):
        ramp.note(held=False)
        assert ramp.load == 2 * FIRST
    ramp.note(held=True)
    assert (ramp.held, ramp.load) == (2 * FIRST, 4 * FIRST)
    for _ in range(TRIES - 1):
        ramp.note(held=False)
        assert ramp.load == 4 * FIRST
    ramp.note(held=False)
    assert 2 * FIRST < ramp.load < 4 * FIRST


def test_it_offers_no_more_than_the_most():
    ramp = Ramp(FIRST, 5000.0, PRECISION)
    assert searched(ramp, 1e9) == [2000.0, 4000.0, 5000.0]
    assert ramp.held == 5000.0
    assert searched(Ramp(FIRST, 500.0, PRECISION), 1e9) == [500.0]


def test_it_gives_up_on_a_server_that_holds_nothing():
    ramp = Ramp(FIRST, MOST, PRECISION)
    assert searched(ramp, 0.0) == sorted([2000.0, 1000.0, 500.0, 250.0] * TRIES, reverse=True)
    assert ramp.held == 0.0

"""A thousand clusters with everything that goes wrong in them, and that it did."""

import pytest

from tests.simulation.play import Tally, play_many, violated_lines
from tests.simulation.scenario import FaultKind, Step

pytestmark = pytest.mark.heavy

SEEDS = range(1000)
#: Bad seeds that are shown.
_SHOWN = 5


@pytest.mark.timeout(1500)
def test_no_invariant_is_violated():
    tally = Tally()
    for played in play_many(SEEDS):
        tally.add(played)
    bad = list(tally.violated.items())
    shown = [line for seed, why in bad[:_SHOWN] for line in violated_lines(seed, why)]
    assert not bad, "\n".join([f"{len(bad)} of {len(SEEDS)} seeds:", *shown])
    _check_coverage(tally)


def _check_coverage(tally: Tally) -> None:
    """What never happened was not tested."""
    counts = tally.counts
    assert not [kind.value for kind in FaultKind if not counts[f"fault {kind.value}"]]
    outcomes = (
        "committed",
        "cancelled",
        "deadline",
        "leaving",
        "no_writer",
        "taken_back",
    )
    outcomes += ("refused", "writer_failed", "writer_lost", "writer_silent")
    assert not [name for name in outcomes if not counts[f"remote/{name}"]]
    assert counts["writes landed in quarantine"] and counts["stopped_writes"]
    assert counts["requests without the broker"]
    assert counts["commits under other claims"] and counts["replayed commits"]
    assert counts["dropped/unclaimed"] and counts["engines ended by a late write"]
    assert counts["leases revoked by supervisors"]
    assert not [step.value for step in Step if not counts[f"planner killed in {step}"]]
    assert counts["planner added"] and counts["planner removed"] and counts["planner elected"]
    assert counts["requests migrated"]
    assert counts["first tokens sent"] and counts["first tokens late"]
    # Some requests waited until their deadline; the judge lets none wait longer.
    assert counts["requests that ended at their deadline"]

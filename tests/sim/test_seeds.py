"""A hundred clusters with everything that goes wrong in them."""

from tests.simulation.report import violated_lines
from tests.simulation.runner import Lost, play_many

SEEDS = range(100)


def test_no_invariant_is_violated():
    bad: list[str] = []
    for outcome in play_many(SEEDS):
        why = [outcome.why] if isinstance(outcome, Lost) else outcome.violations
        bad += violated_lines(outcome.seed, why[0]) if why else []
    assert not bad, "\n".join(bad)

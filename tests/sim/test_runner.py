"""Seeds in processes of their own."""

import multiprocessing
import os
import signal
from contextlib import closing

import pytest

from dynamo_lite.protocol.errors import StartupError
from tests.simulation import worker
from tests.simulation.play import play
from tests.simulation.runner import Lost, play_many
from tests.simulation.tally import Played

pytestmark = pytest.mark.heavy

SEEDS = range(3, 24)


@pytest.mark.timeout(400)
def test_the_outcomes_do_not_depend_on_the_number_of_processes():
    alone = [play(seed) for seed in SEEDS]
    assert list(play_many(SEEDS, jobs=1)) == alone
    assert list(play_many(SEEDS, jobs=3)) == alone


def test_a_mutant_is_played():
    outcomes = list(play_many(range(4), jobs=1, mutant="no-claim"))
    assert any(isinstance(outcome, Played) and outcome.violations for outcome in outcomes)


def test_a_process_that_dies_costs_the_seed_that_it_played_and_no_other():
    with closing(play_many(range(1000), jobs=1, portion=1000)) as outcomes:
        played = [next(outcomes), next(outcomes)]
        [child] = multiprocessing.active_children()
        os.kill(child.pid or 0, signal.SIGKILL)
        for outcome in outcomes:
            played.append(outcome)
            if isinstance(outcome, Lost):
                break
        played += [next(outcomes), next(outcomes)]
    assert [outcome.seed for outcome in played] == list(range(len(played)))
    [lost] = [outcome for outcome in played if isinstance(outcome, Lost)]
    assert lost.why == "the process that played it died: signal 9"


def test_a_process_that_dies_between_two_portions_costs_nothing():
    outcomes = play_many(range(12), jobs=1)
    played = [next(outcomes) for _ in range(8)]
    [child] = multiprocessing.active_children()
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    played += outcomes
    assert [outcome.seed for outcome in played] == list(range(12))
    # Unless it had begun with the next one.
    assert [outcome.seed for outcome in played if isinstance(outcome, Lost)] in ([], [8])


def test_a_seed_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch):
    with closing(play_many(range(2), jobs=1)) as outcomes:
        played = next(outcomes)
        assert isinstance(played, Played)
        [child] = multiprocessing.active_children()
        os.kill(child.pid or 0, signal.SIGSTOP)
        monkeypatch.setattr("tests.simulation.runner._SEED_S", 0.5)
        lost = next(outcomes)
    # It may have been quicker than the signal.
    assert isinstance(lost, Played) or "no end after 0.5 s" in lost.why


def test_whoever_stops_early_leaves_no_process_behind():
    outcomes = play_many(range(100_000), jobs=2)
    next(outcomes)
    assert len(multiprocessing.active_children()) == 2
    outcomes.close()
    assert multiprocessing.active_children() == []


def test_processes_that_cannot_start_are_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "work", os._exit)
    with pytest.raises(StartupError, match="did not start"):
        list(play_many(range(2), jobs=1))

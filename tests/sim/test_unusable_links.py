"""Whole clusters in which a prefill worker cannot write into a decode worker."""

import random

import pytest

from tests.simulation.engine.model import VOCABULARY, Sampling
from tests.simulation.play import play_scenario
from tests.simulation.scenario import Ask, Fault, FaultKind, Scenario


def asks(at_s: float, count: int, every_s: float = 0.2) -> tuple[Ask, ...]:
    """Long prompts, one after the other."""
    rng = random.Random(at_s)
    return tuple(
        Ask(
            at_s=at_s + every_s * number,
            request_id=f"r{at_s:g}-{number}",
            prompt=tuple(rng.randrange(VOCABULARY) for _ in range(80)),
            sampling=Sampling(max_tokens=4),
        )
        for number in range(count)
    )


def cut(for_s: float) -> Fault:
    """From before the first contact on; NATS and etcd are reached by both."""
    return Fault(at_s=0.0, kind=FaultKind.CUT, target="prefill-0", other="decode-0", for_s=for_s)


def test_the_prompt_that_meets_a_bad_link_is_computed_here_and_the_next_ones_at_once():
    """Until the link is tried again, when it works."""
    played = play_scenario(
        Scenario(
            seed=5,
            faults=(cut(30.0),),
            asks=(*asks(8.0, 1), *asks(9.3, 3), *asks(100.0, 5)),
            quiet_at_s=105.0,
        )
    )
    counts = played.counts
    assert played.violations == []
    assert counts["request length"] == 9
    assert counts["decision/local/no_prefill_worker"] == 3
    assert counts["remote/writer_failed"] == counts["resume/no_other"] == 1
    assert counts["decision/remote/long"] == 6 and counts["remote/committed"] == 5


def test_a_link_that_stays_bad_is_tried_ever_more_seldom():
    played = play_scenario(
        Scenario(seed=5, faults=(cut(300.0),), asks=asks(8.0, 160, every_s=1.5), quiet_at_s=250.0)
    )
    counts = played.counts
    assert played.violations == []
    assert counts["request length"] == 160
    # After pauses of 1, 2, 4, 8, 16, 32, 60 and 60 s.
    assert 7 <= counts["remote/writer_failed"] <= 9
    local = counts["decision/local/no_prefill_worker"]
    assert local == 160 - counts["remote/writer_failed"]


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 6, 8, 9])
def test_a_fit_worker_does_what_is_asked_for_whichever_pulls_it_first(seed: int):
    """prefill-0 can write into decode-1 only, so it pulls jobs, also those for decode-0."""
    played = play_scenario(
        Scenario(
            seed=seed,
            decode=2,
            prefill=2,
            max_jobs=64,
            faults=(cut(60.0),),
            asks=asks(8.0, 20),
            quiet_at_s=60.0,
        )
    )
    counts = played.counts
    assert played.violations == []
    assert counts["request length"] == 20
    committed = counts["remote/committed"]
    assert committed == counts["attempt written"] >= 18
    # Jobs that met the bad link were requested again, unless they met it twice.
    met, again = counts["remote/writer_failed"], counts["resume/writer_lost"]
    assert 1 <= met <= 10
    assert counts["decision/remote/long"] == 20 + again
    assert met - again == 20 - committed
    assert "remote/deadline" not in counts

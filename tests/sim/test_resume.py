"""A whole cluster whose prefill worker dies half-way through a long prompt."""

import random
from collections.abc import Mapping

import pytest

from tests.simulation.engine.model import PLANES, VOCABULARY, Sampling
from tests.simulation.play import play_scenario
from tests.simulation.scenario import Ask, Fault, FaultKind, Scenario

PROMPT = tuple(random.Random(1).randrange(VOCABULARY) for _ in range(300))


def scenario(kind: FaultKind, at_s: float, target: str) -> Scenario:
    """A step computes 48 tokens of the prompt, in about one second."""
    return Scenario(
        seed=6,
        prefill=2,
        remote_prefill_timeout_s=25.0,
        slowest_write_s=0.1,
        token_s=0.02,
        quiet_at_s=6.0,
        faults=(Fault(at_s=at_s, kind=kind, target=target, for_s=20.0),),
        asks=(Ask(at_s=3.0, request_id="r", prompt=PROMPT, sampling=Sampling(max_tokens=8)),),
    )


def struck(kind: FaultKind, at_s: float) -> Mapping[str, int]:
    """What a fault at the one of two equal workers that has pulled the job leads to."""
    plays = [play_scenario(scenario(kind, at_s, f"prefill-{i}")) for i in (0, 1)]
    assert [play.violations for play in plays] == [[], []]
    (counts,) = (play.counts for play in plays if "resume/writer_lost" in play.counts)
    return counts


@pytest.mark.parametrize(
    "kind", [FaultKind.CRASH, FaultKind.PAUSE, FaultKind.ENGINE_CRASH, FaultKind.ISOLATE]
)
def test_another_worker_does_what_is_missing(kind: FaultKind):
    counts = struck(kind, at_s=8.6)
    assert counts["request length"] == 1
    assert counts["resume/writer_lost"] == 1
    assert counts["decision/remote/long"] == 2
    assert counts["remote/committed"] == 1
    assert counts["prefix_read/read"] == 1
    # Five chunks of 48 tokens have landed; the writer has seen that of four.
    assert counts["prefix_bytes"] == 4 * 48 * PLANES * 8


def test_who_dies_before_anything_has_landed_leaves_all_to_another():
    counts = struck(FaultKind.CRASH, at_s=3.5)
    assert counts["remote/committed"] == 1
    assert "prefix_read/read" not in counts

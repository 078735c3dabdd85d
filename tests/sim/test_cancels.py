"""Callers that leave at any moment: nothing leaks, nothing is written where it should not be."""

import random
from dataclasses import replace

import pytest

from dynamo_lite.disagg.attempts.ledger import CLAIM_S, AttemptState
from tests.simulation.draw import draw
from tests.simulation.mutants import MUTANTS
from tests.simulation.play import Tally, play_scenario
from tests.simulation.scenario import LOAD_FROM_S, Ask, Sampling, Scenario

pytestmark = pytest.mark.heavy

CANCELS, PER_SEED = 500, 25
#: In each state of the ledger, at least; and seeds, at most.
IN_EACH_STATE, MOST_SEEDS = 10, 100
_EACH_S = 0.4  # for each request
#: Requests that come at about the same time: jobs wait for those before them.
_BURST, _BURST_S = 5, 0.08


def cancels(seed: int) -> Scenario:
    """Long prompts and slow engines, no faults: every caller leaves early, or a bit late.

    Half of the clusters have little patience with their writers, which are then
    still at it when the request goes on elsewhere.
    """
    rng = random.Random(f"cancels/{seed}")
    scenario = replace(
        draw(seed),
        planner=None,
        faults=(),
        num_blocks=128,
        prefill=1 + seed % 2,
        token_s=rng.choice((0.001, 0.004)),
        slowest_write_s=rng.choice((0.01, 0.3, 0.8)),
        remote_prefill_timeout_s=rng.choice((0.3, 0.6, 6.0)),
        quiet_at_s=LOAD_FROM_S + PER_SEED * _EACH_S,
    )
    asks = [_ask(scenario, rng, number) for number in range(PER_SEED)]
    return replace(scenario, asks=tuple(sorted(asks, key=lambda ask: ask.at_s)))


def _ask(scenario: Scenario, rng: random.Random, number: int) -> Ask:
    prompt = tuple(rng.randrange(1 << 30) for _ in range(rng.randint(16, 120)))
    return Ask(
        at_s=LOAD_FROM_S + (number - number % _BURST) * _EACH_S + _BURST_S * rng.random(),
        client=rng.randrange(scenario.clients),
        request_id=f"r{number}",
        prompt=prompt,
        sampling=Sampling(max_tokens=24),
        timeout_s=25.0,
        cancel_after_s=rng.choice((10 ** rng.uniform(-4, 0), rng.uniform(0, 1.5))),
    )


def reached(tally: Tally) -> dict[AttemptState, int]:
    return {state: tally.counts[f"abort {state.value}"] for state in AttemptState}


@pytest.fixture(scope="module")
def tally() -> Tally:
    tally = Tally()
    for seed in range(MOST_SEEDS):
        tally.add(play_scenario(cancels(seed)))
        enough = min(reached(tally).values()) >= IN_EACH_STATE
        if enough and tally.counts["request cancelled"] >= CANCELS:
            break
    return tally


@pytest.mark.timeout(400)
def test_a_cancel_at_any_moment_leaks_no_block_and_leads_no_write_astray(tally: Tally):
    assert tally.violated == {}
    assert tally.counts["writes landed in quarantine"] > 100


def test_every_state_of_the_ledger_was_cancelled_in(tally: Tally):
    assert tally.counts["request cancelled"] >= CANCELS
    assert min(reached(tally).values()) >= IN_EACH_STATE, reached(tally)
    assert tally.counts["abort waiting"] and tally.counts["abort running"]


def test_a_cancel_reaches_the_writer_with_the_next_renewal(tally: Tally):
    sent = tally.counts["cancels sent to writers"]
    assert sent > 50
    assert tally.counts["cancels that reached writers"] == sent
    assert 0 < tally.cancel_s < CLAIM_S / 3 + 0.2


def test_without_quarantine_a_cancel_leads_writes_astray():
    found = [play_scenario(cancels(0), shipped=MUTANTS["no-quarantine"].parts).violations]
    assert any("landed in block" in text for texts in found for text in texts)

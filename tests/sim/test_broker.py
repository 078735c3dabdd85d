"""Requests that start, stream and end while the broker is away: whole clusters, no other fault."""

import random
from dataclasses import replace

import pytest

from tests.simulation.draw import draw
from tests.simulation.play import play_scenario
from tests.simulation.scenario import LOAD_FROM_S, Ask, Fault, FaultKind, Sampling, Scenario

ASKS, EACH_S = 40, 0.1
#: The load begins when all workers are up and before the fault, and continues after it.
ASKS_FROM_S = LOAD_FROM_S + 2.0
FAULT_AT_S, FAULT_S = ASKS_FROM_S + 0.5, 3.0
#: A decode engine's `max_local_prefill_length` in the simulation.
LOCAL_TOKENS = 12


def outage(seed: int, kind: FaultKind, tokens: tuple[int, int]) -> Scenario:
    """tokens: of the shortest and the longest prompt."""
    rng = random.Random(f"outage/{seed}")
    asks = [
        Ask(
            at_s=ASKS_FROM_S + number * EACH_S,
            request_id=f"r{number}",
            prompt=tuple(rng.randrange(1 << 30) for _ in range(rng.randint(*tokens))),
            sampling=Sampling(max_tokens=8),
            timeout_s=25.0,
        )
        for number in range(ASKS)
    ]
    return replace(
        draw(seed),
        planner=None,
        faults=(Fault(at_s=FAULT_AT_S, kind=kind, for_s=FAULT_S),),
        decode=2,
        prefill=1,
        clients=1,
        num_blocks=128,
        token_s=0.001,
        remote_prefill_timeout_s=2.0,
        quiet_at_s=ASKS_FROM_S + ASKS * EACH_S,
        asks=tuple(asks),
    )


@pytest.mark.parametrize("kind", [FaultKind.BROKER_PAUSE, FaultKind.BROKER_CRASH])
@pytest.mark.parametrize("seed", [0, 2])
def test_local_prompts_do_not_notice_an_outage(seed: int, kind: FaultKind):
    played = play_scenario(outage(seed, kind, (1, LOCAL_TOKENS)))
    assert played.violations == []
    assert played.counts["request length"] == ASKS
    assert played.counts["requests without the broker"] > ASKS / 2
    assert 0 < played.longest_wait_s < 0.5


@pytest.mark.parametrize("kind", [FaultKind.BROKER_PAUSE, FaultKind.BROKER_CRASH])
@pytest.mark.parametrize("seed", [0, 2])
def test_long_prompts_wait_for_no_longer_than_a_remote_prefill_may_take(seed: int, kind: FaultKind):
    """They wait for a push that is not confirmed, or for a prefill that was queued before."""
    scenario = outage(seed, kind, (40, 80))
    played = play_scenario(scenario)
    assert played.violations == []
    assert played.counts["request length"] == ASKS
    assert played.counts["decision/local/queue_unknown"]
    assert 0 < played.longest_wait_s < scenario.remote_prefill_timeout_s + 0.5

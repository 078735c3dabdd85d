"""A whole cluster with a prefill worker that hangs during a burst of long prompts."""

import random

import pytest

from tests.simulation.engine.model import VOCABULARY, Sampling
from tests.simulation.loop.loop import START_S, Trace
from tests.simulation.play import play_scenario
from tests.simulation.scenario import Ask, Fault, FaultKind, Scenario

LIMIT_S, STEP_S = 2.0, 0.1
#: The burst, and the standstill, which begins amid it. It is shorter than the time after which a
#: worker counts as unresponsive.
PROMPTS, BURST_AT_S, STANDS_AT_S, STANDS_S = 8, 6.0, 6.215, 3.5


def ask(number: int, at_s: float) -> Ask:
    rng = random.Random(number)
    return Ask(
        at_s=at_s,
        request_id=f"r{number}",
        prompt=tuple(rng.randrange(VOCABULARY) for _ in range(100)),
        sampling=Sampling(max_tokens=4),
    )


@pytest.mark.parametrize("decode", [1, 2])
@pytest.mark.parametrize("kind", [FaultKind.PAUSE, FaultKind.COMPONENT_PAUSE])
def test_what_is_not_claimed_in_time_is_computed_here_and_the_rest_is_served(
    kind: FaultKind, decode: int
):
    warm = [ask(number, 3.0 + number / 10) for number in range(4)]
    burst = [ask(10 + number, BURST_AT_S + number / 100) for number in range(PROMPTS)]
    trace = Trace(on=True)
    played = play_scenario(
        Scenario(
            seed=1,
            decode=decode,
            num_blocks=512,
            lease_ttl_s=20.0,
            remote_prefill_timeout_s=25.0,
            max_jobs=64,
            slowest_write_s=0.01,
            quiet_at_s=15.0,
            max_queue_wait_s=LIMIT_S,
            faults=(Fault(at_s=STANDS_AT_S, kind=kind, target="prefill-0", for_s=STANDS_S),),
            asks=(*warm, *burst),
        ),
        trace=trace,
    )
    counts = played.counts
    assert played.violations == []
    assert counts["request length"] == len(warm) + PROMPTS
    back, committed = counts["remote/taken_back"], counts["remote/committed"]
    # The worker holds some jobs while it stands, and is done with some before.
    assert 4 <= back <= PROMPTS - 2
    # The claims of what it had pulled may run out. It is asked again, or computes here.
    lost = counts.get("remote/writer_lost", 0)
    assert lost <= 3
    assert len(warm) + PROMPTS - lost <= back + committed <= len(warm) + PROMPTS
    times = [at_s - START_S for at_s, _, text in trace.lines if "ended: taken_back" in text]
    assert len(times) == back
    # The queue moved until the standstill.
    assert BURST_AT_S + LIMIT_S <= min(times)
    assert max(times) <= STANDS_AT_S + LIMIT_S + STEP_S

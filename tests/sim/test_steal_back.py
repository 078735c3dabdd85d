"""A whole cluster with a prefill worker that hangs during a burst of long prompts."""

import random
from collections.abc import Mapping

from dynamo_lite.simulation.engine.model import VOCABULARY, Sampling
from dynamo_lite.simulation.play import play_scenario
from dynamo_lite.simulation.scenario import Ask, Fault, FaultKind, Scenario

#: Shorter than the time after which it counts as unresponsive.
STANDS_S = 3.5


def ask(number: int, at_s: float) -> Ask:
    rng = random.Random(number)
    return Ask(
        at_s=at_s,
        client=0,
        request_id=f"r{number}",
        prompt=tuple(rng.randrange(VOCABULARY) for _ in range(100)),
        sampling=Sampling(max_tokens=4),
        timeout_s=30.0,
    )


def burst(kind: FaultKind, decode: int = 1) -> Mapping[str, int]:
    """First a standstill until all is given up: the engines learn how fast they compute. Then one
    that is over before the worker is given up; it begins when the second prompt of ten comes."""
    learn = [ask(number, 3.0) for number in range(2 * decode)]
    warm = [ask(number, 14.0 + number / 10) for number in range(10, 10 + 2 * decode)]
    many = [ask(number, 16.0 + number / 100) for number in range(20, 30)]
    faults = (
        Fault(at_s=2.9, kind=kind, target="prefill-0", for_s=9.0),
        Fault(at_s=16.215, kind=kind, target="prefill-0", for_s=STANDS_S),
    )
    played = play_scenario(
        Scenario(
            seed=1,
            profile="burst",
            decode=decode,
            prefill=1,
            clients=1,
            num_blocks=512,
            lease_ttl_s=20.0,
            remote_prefill_timeout_s=25.0,
            ack_wait_s=2.0,
            max_jobs=64,
            slowest_write_s=0.01,
            token_s=0.001,
            quiet_at_s=25.0,
            faults=faults,
            asks=(*learn, *warm, *many),
        )
    )
    assert played.violations == []
    assert played.counts["request length"] == len(learn) + len(warm) + len(many)
    return played.counts


def test_prompts_are_taken_back_one_by_one_and_the_rest_is_served_later():
    for kind in (FaultKind.PAUSE, FaultKind.COMPONENT_PAUSE):
        counts = burst(kind)
        assert 1 <= counts["remote/taken_back"] <= 8
        taken = counts["steal_look/overdue"] + counts.get("steal_look/queue_long", 0)
        assert counts["remote/taken_back"] == taken
        assert counts["remote/committed"] >= 2 + 1
        assert counts["steal_look/prefill_here"] > 0


def test_two_engines_take_back_what_is_theirs():
    counts = burst(FaultKind.PAUSE, decode=2)
    assert counts["remote/taken_back"] >= 2

"""A whole cluster with a prefill worker that hangs during a burst of long prompts."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from tests.simulation.engine.model import VOCABULARY, Sampling
from tests.simulation.loop.scheduler import START_S
from tests.simulation.loop.trace import Trace
from tests.simulation.play import play_scenario
from tests.simulation.scenario import Ask, Fault, FaultKind, Scenario

pytestmark = pytest.mark.heavy

#: Shorter than the time after which it counts as unresponsive.
STANDS_S = 3.5


@dataclass(frozen=True)
class Taken:
    """One prompt that was taken back."""

    at_s: float
    engine: str


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


def played(
    asks: Sequence[Ask], *standstills: Fault, decode: int
) -> tuple[Mapping[str, int], list[Taken]]:
    """Counts, and what was taken back. All requests are answered, and every invariant holds."""
    trace = Trace(on=True)
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
            # The first standstill lasts until all is given up: the engines learn how fast they
            # compute.
            faults=(
                Fault(at_s=2.9, kind=standstills[0].kind, target="prefill-0", for_s=9.0),
                *standstills,
            ),
            asks=tuple(asks),
        ),
        trace=trace,
    )
    assert played.violations == []
    assert played.counts["request length"] == len(asks)
    taken = [
        Taken(at_s - START_S, process.partition(".")[0])
        for at_s, process, text in trace.lines
        if "is taken back after" in text
    ]
    assert len(taken) == played.counts["remote/taken_back"]
    return played.counts, taken


def burst(kind: FaultKind, decode: int = 1) -> tuple[Mapping[str, int], list[Taken]]:
    """A standstill that is over before the worker is given up; it begins when the second prompt of
    ten comes."""
    learn = [ask(number, 3.0) for number in range(2 * decode)]
    warm = [ask(number, 14.0 + number / 10) for number in range(10, 10 + 2 * decode)]
    many = [ask(number, 16.0 + number / 100) for number in range(20, 30)]
    stands = Fault(at_s=16.215, kind=kind, target="prefill-0", for_s=STANDS_S)
    return played([*learn, *warm, *many], stands, decode=decode)


def test_prompts_are_taken_back_one_by_one_and_the_rest_is_served_later():
    for kind in (FaultKind.PAUSE, FaultKind.COMPONENT_PAUSE):
        counts, taken = burst(kind)
        assert 1 <= len(taken) <= 8
        looks = counts["steal_look/overdue"] + counts.get("steal_look/queue_long", 0)
        assert len(taken) == looks
        assert counts["remote/committed"] >= 2 + 1
        assert counts["steal_look/prefill_here"] > 0


def test_two_engines_take_back_what_is_theirs_one_at_a_time():
    _, taken = burst(FaultKind.PAUSE, decode=2)
    assert 2 <= len(taken) <= 8
    for engine in ("decode-0", "decode-1"):
        times = [one.at_s for one in taken if one.engine == engine]
        assert times
        # In between it computes the one before: about 100 tokens at a millisecond each.
        assert all(later - earlier > 0.1 for earlier, later in itertools.pairwise(times))

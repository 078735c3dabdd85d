"""A writer whose component stands still: its engine writes until the end of its claim, and what it
has started by then arrives later."""

import random

from tests.simulation.engine.model import VOCABULARY, Sampling
from tests.simulation.mutants import NO_LANDING_TIME
from tests.simulation.play import Played, play_scenario
from tests.simulation.scenario import Ask, Fault, FaultKind, Scenario
from tests.simulation.shipped import Shipped

SEEDS = (14, 22, 31)


def played(seed: int, shipped: Shipped | None = None) -> Played:
    """Prompts of which each takes the prefill engine longer than a claim holds, in a small pool."""
    rng = random.Random(seed)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(length))

    long = [
        Ask(
            at_s=3.0 + n / 20,
            request_id=f"l{n}",
            prompt=prompt(100),
            sampling=Sampling(max_tokens=4),
        )
        for n in range(2)
    ]
    others = [
        Ask(
            at_s=4.5 + n / 10,
            request_id=f"o{n}",
            prompt=prompt(40),
            sampling=Sampling(max_tokens=8),
            timeout_s=40.0,
        )
        for n in range(60)
    ]
    return play_scenario(
        Scenario(
            seed=seed,
            num_blocks=64,
            token_s=0.01,
            slowest_write_s=0.9,
            lease_ttl_s=5.0,
            max_queue_wait_s=0.3,
            remote_prefill_timeout_s=20.0,
            quiet_at_s=20.0,
            faults=(
                Fault(
                    at_s=3.2 + rng.random(),
                    kind=FaultKind.COMPONENT_PAUSE,
                    target="prefill-0",
                    for_s=4.0,
                ),
            ),
            asks=(*long, *others),
        ),
        shipped=shipped,
    )


def test_nothing_that_arrives_after_the_end_of_a_claim_goes_astray():
    plays = [played(seed) for seed in SEEDS]
    assert [play.violations for play in plays] == [[] for _ in SEEDS]
    assert sum(play.counts.get("writes landed in quarantine", 0) for play in plays) > 0


def test_blocks_that_are_free_at_the_end_of_the_claim_are_written_into():
    plays = [played(seed, NO_LANDING_TIME.parts) for seed in SEEDS]
    assert any(NO_LANDING_TIME.violates in text for play in plays for text in play.violations)

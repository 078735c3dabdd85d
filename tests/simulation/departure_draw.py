"""Draws the departure of a decode worker during long answers, for one seed of twenty."""

import random
from dataclasses import replace

from tests.simulation.engine.model import VOCABULARY, Sampling
from tests.simulation.scenario import LOAD_FROM_S, Ask, Fault, FaultKind, Scenario

#: One of `_EVERY` seeds; none that has a planner.
_EVERY, _AT = 20, 16
_ASKS = 8
#: Answers run for some tenths of a second, so that they have begun and not ended.
_TOKEN_S, _MOST_TOKENS = 0.01, 60
#: The other workers stop this long before the departure, and for this long.
_STOPPED_BEFORE_S, _STOPPED_S = 0.01, 1.0


def has_departure(seed: int) -> bool:
    return seed % _EVERY == _AT


def with_departure(scenario: Scenario) -> Scenario:
    """The scenario with such a departure.

    In half of these runs the other decode workers have just stopped, and die while they are asked
    to take the answers. So these stay at their worker, which has gone on meanwhile.
    """
    rng = random.Random(f"departure/{scenario.seed}")
    decode = max(scenario.decode, 2)
    at_s = LOAD_FROM_S + rng.uniform(1.0, 4.0)
    kind = rng.choice((FaultKind.DRAIN, FaultKind.REVOKE))
    faults = [*scenario.faults, Fault(at_s=at_s, kind=kind, target="decode-0")]
    if rng.random() < 0.5:
        for other in range(1, decode):
            target = f"decode-{other}"
            stopped_s = at_s - _STOPPED_BEFORE_S
            faults.append(
                Fault(at_s=stopped_s, kind=FaultKind.PAUSE, target=target, for_s=_STOPPED_S)
            )
            dies_s = at_s + rng.uniform(0.03, 0.1)
            faults.append(Fault(at_s=dies_s, kind=FaultKind.CRASH, target=target))
    asks = [*scenario.asks, *(_ask(scenario, rng, number, at_s) for number in range(_ASKS))]
    return replace(
        scenario,
        decode=decode,
        token_s=_TOKEN_S,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        quiet_at_s=max(scenario.quiet_at_s, at_s + _STOPPED_S),
    )


def _ask(scenario: Scenario, rng: random.Random, number: int, until_s: float) -> Ask:
    return Ask(
        at_s=until_s - rng.uniform(0.05, 0.3),
        client=rng.randrange(scenario.clients),
        request_id=f"long{number}",
        prompt=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))),
        sampling=Sampling(max_tokens=rng.randint(_MOST_TOKENS // 2, _MOST_TOKENS)),
        timeout_s=rng.uniform(12.0, 25.0),
    )

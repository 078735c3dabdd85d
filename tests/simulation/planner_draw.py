"""Draws the planner of a seed, and the load and the faults that it meets."""

import random
from collections.abc import Sequence
from dataclasses import replace

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.limits import bounds
from dynamo_lite.protocol.options import PlannerOptions
from tests.simulation.engine.model import VOCABULARY, Sampling
from tests.simulation.scenario import (
    LOAD_FROM_S,
    Ask,
    BadStarts,
    Fault,
    FaultKind,
    PlannerScenario,
    Scenario,
    Step,
    Wish,
)

#: One seed of this many has a planner. All other seeds are the same as without planners.
EVERY = 10
#: How often the budget is full, so that a role gets a device when another one has given it; decode
#: and prefill workers then.
_FULL = 0.3
_LOPSIDED = ((2, 1), (3, 1), (1, 2), (1, 3))
#: How often a worker is lost for long.
_LOST = 0.15
#: Few runs have withdrawals.
_STEP_WEIGHTS = [3 if step.startswith("withdraw") else 1 for step in Step]
#: Faults of planners, and of the servers that they need.
_KINDS = (
    FaultKind.CRASH,
    FaultKind.CRASH,
    FaultKind.PAUSE,
    FaultKind.REVOKE,
    FaultKind.ISOLATE,
    FaultKind.CUT,
    FaultKind.STORE_CRASH,
    FaultKind.STORE_PAUSE,
    FaultKind.STORE_WIPE,
    FaultKind.BROKER_CRASH,
    FaultKind.BROKER_PAUSE,
)


def has_planner(seed: int) -> bool:
    return seed % EVERY == EVERY - 1


def with_planner(scenario: Scenario) -> Scenario:
    """The scenario with planners, waves of load, and half of the time without its own faults."""
    rng = random.Random(f"planner/{scenario.seed}")
    until_s = LOAD_FROM_S + rng.uniform(12.0, 20.0)
    one_is_dry = rng.random() < 0.2
    planners = rng.choice((1, 1, 2)) + one_is_dry
    full = rng.random() < _FULL
    if full:
        decode, prefill = rng.choice(_LOPSIDED)
        scenario = replace(scenario, decode=decode, prefill=prefill)
    options = _options(scenario, rng, full=full)
    waves = [rng.uniform(LOAD_FROM_S, until_s - 3.0) for _ in range(rng.choice((2, 2, 3, 4)))]
    bad_starts, wishes = _bad_starts(waves, rng), _wishes(options, waves, until_s, rng)
    faults = list(scenario.faults) if rng.random() < 0.5 else []
    faults += [_fault(scenario, planners, until_s, rng) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
    if rng.random() < _LOST:
        crash, lost, wish = _loss(scenario, rng)
        faults, bad_starts, wishes = [*faults, crash], [lost], [*wishes, wish]
        until_s = max(until_s, lost.to_s)
    scenario = replace(
        scenario,
        profile="planner",
        token_s=rng.choice((0.003, 0.006, 0.01)),
        planner=PlannerScenario(
            planners=planners,
            one_is_dry=one_is_dry,
            pods=rng.random() < 0.4,
            options=options,
            devices=options.budget_devices + rng.choice((0, 2, 2)),
            crashes=tuple(rng.choices(list(Step), _STEP_WEIGHTS, k=rng.choice((0, 1, 3, 6)))),
            bad_starts=tuple(bad_starts),
            wishes=tuple(sorted(wishes, key=lambda wish: wish.at_s)),
        ),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        quiet_at_s=max(until_s, *(f.at_s + f.for_s for f in faults), scenario.quiet_at_s),
    )
    asks = [*scenario.asks, *_waves(scenario, waves, rng)]
    return replace(scenario, asks=tuple(sorted(asks, key=lambda ask: ask.at_s)))


def _loss(scenario: Scenario, rng: random.Random) -> tuple[Fault, BadStarts, Wish]:
    """A worker crashes and does not come back for long. Meanwhile an operator wants only one."""
    role = rng.choice(tuple(Role))
    at_s = LOAD_FROM_S + rng.uniform(0.0, 3.0)
    wanted_s = at_s + scenario.lease_ttl_s + 5.0
    return (
        Fault(at_s=at_s, kind=FaultKind.CRASH, target=f"{role.word}-{rng.randrange(2)}"),
        BadStarts(from_s=at_s, to_s=wanted_s + 4.0, hang=True, restarts=True),
        Wish(at_s=wanted_s, component=role, count=1),
    )


def _options(scenario: Scenario, rng: random.Random, *, full: bool) -> PlannerOptions:
    """The usual options, in seconds instead of minutes."""
    workers = scenario.decode + scenario.prefill
    options = PlannerOptions(
        budget_devices=max(workers, rng.choice((3, 4, 5, 6, 8))),
        prefill_min=1,
        prefill_max=rng.choice((2, 3, 4)),
        decode_min=rng.choice((1, 1, 2)),
        decode_max=rng.choice((2, 3, 4)),
        tick_s=rng.uniform(0.2, 0.6),
        down_window_s=rng.uniform(1.5, 5.0),
        cooldown_s=rng.uniform(0.3, 2.0),
        start_s=rng.uniform(0.5, 2.0),
        start_timeout_s=rng.uniform(2.5, 5.0),
    )
    if not full:
        return options
    # What is idle is not removed before another role needs its device.
    window_s = rng.uniform(5.0, 20.0)
    limits = {"prefill_max": 4, "decode_min": 1, "decode_max": 4}
    return replace(options, budget_devices=workers, down_window_s=window_s, **limits)


def _bad_starts(waves: Sequence[float], rng: random.Random) -> list[BadStarts]:
    """waves: when the load rises."""
    if rng.random() < 0.5:
        return []
    from_s = max(rng.choice((*waves, min(waves), min(waves))), LOAD_FROM_S + 1.0)
    to_s = from_s + rng.uniform(3.0, 15.0)
    return [BadStarts(from_s=from_s, to_s=to_s, hang=rng.random() < 0.7)]


def _wishes(
    options: PlannerOptions, waves: Sequence[float], until_s: float, rng: random.Random
) -> list[Wish]:
    """Half of them while there is work."""
    wishes: list[Wish] = []
    for _ in range(rng.choice((0, 1, 2, 3, 4))):
        role = rng.choice(tuple(Role))
        at_s = rng.choice((rng.uniform(LOAD_FROM_S, until_s), rng.choice(waves) + rng.random()))
        count = rng.randint(*bounds(options, role))
        wishes.append(Wish(at_s=at_s, component=role, count=count))
    return wishes


def _fault(scenario: Scenario, planners: int, until_s: float, rng: random.Random) -> Fault:
    kind = rng.choice(_KINDS)
    at_s = rng.uniform(LOAD_FROM_S, until_s)
    for_s = rng.choice((rng.uniform(0.1, 1.0), rng.uniform(0.5, 2.5) * scenario.lease_ttl_s))
    target = f"planner-{rng.randrange(planners)}"
    match kind:
        case FaultKind.CRASH | FaultKind.REVOKE:
            return Fault(at_s=at_s, kind=kind, target=target)
        case FaultKind.PAUSE | FaultKind.ISOLATE:
            return Fault(at_s=at_s, kind=kind, target=target, for_s=for_s)
        case FaultKind.CUT:
            other = rng.choice(("nats", "etcd", "supervisor"))
            return Fault(at_s=at_s, kind=kind, target=target, other=other, for_s=for_s)
        case _:
            return Fault(at_s=at_s, kind=kind, for_s=for_s)


def _waves(scenario: Scenario, waves: Sequence[float], rng: random.Random) -> list[Ask]:
    """Bursts of many requests, with pauses in which fewer workers would do."""
    asks: list[Ask] = []
    leaving = rng.choice((0.15, 0.15, 0.7))
    for number, from_s in enumerate(waves):
        lasts_s = rng.uniform(1.5, 4.0)
        longest = min(120, 4 * (scenario.num_blocks - 1) - 20)
        for index in range(rng.randint(10, 40)):
            length = rng.randint(1, rng.choice((12, longest)))
            room = 4 * (scenario.num_blocks - 1) - length
            ask = Ask(
                at_s=from_s + rng.uniform(0, lasts_s),
                client=rng.randrange(scenario.clients),
                request_id=f"w{number}-{index}",
                prompt=tuple(rng.randrange(VOCABULARY) for _ in range(length)),
                sampling=Sampling(max_tokens=rng.randint(4, min(40, room))),
                timeout_s=rng.uniform(15.0, 25.0),
                cancel_after_s=rng.uniform(0.0, 2.0) if rng.random() < leaving else None,
            )
            asks.append(ask)
    return asks

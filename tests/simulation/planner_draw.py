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
#: In one of this many seeds a worker is lost for long.
_LOST_EVERY = 100
#: At these, of as many, starts are withdrawn, additions are resumed, and workers leave whose writes
#: go on.
_WITHDRAWN, _RESUMED, _LEFT = 19, 39, 99

_STEPS = (
    Step("add", "wanted"),
    Step("add", "ordered"),
    Step("withdraw", "wanted"),
    Step("withdraw", "ordered"),
    Step("remove", "wanted"),
    Step("remove", "ordered"),
)
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
    options = _options(scenario, rng)
    waves = [rng.uniform(LOAD_FROM_S, until_s - 3.0) for _ in range(rng.choice((2, 2, 3, 4)))]
    crashes = rng.sample(_STEPS, rng.choice((0, 1, 2, 3)))
    planner = PlannerScenario(
        planners=planners,
        one_is_dry=one_is_dry,
        pods=rng.random() < 0.4,
        options=options,
        devices=options.budget_devices + rng.choice((0, 2, 2)),
        crashes=tuple(crashes),
        bad_starts=_bad_starts(waves, until_s, rng),
        wishes=_wishes(options, until_s, rng),
    )
    faults = list(scenario.faults) if rng.random() < 0.5 else []
    faults += [_fault(scenario, planners, until_s, rng) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
    faults.sort(key=lambda fault: fault.at_s)
    scenario = replace(
        scenario,
        profile="planner",
        token_s=rng.choice((0.003, 0.006, 0.01)),
        planner=planner,
        faults=tuple(faults),
        quiet_at_s=max(until_s, *(f.at_s + f.for_s for f in faults), scenario.quiet_at_s),
    )
    asks = [*scenario.asks, *_waves(scenario, waves, rng)]
    scenario = replace(scenario, asks=tuple(sorted(asks, key=lambda ask: ask.at_s)))
    if scenario.seed % _LOST_EVERY == _LOST_EVERY - EVERY - 1:
        return _with_lost_worker(scenario, planner, random.Random(f"lost/{scenario.seed}"))
    if scenario.seed % _LOST_EVERY == _WITHDRAWN:
        return _with_withdrawn_starts(scenario, planner, random.Random(f"late/{scenario.seed}"))
    if scenario.seed % _LOST_EVERY == _RESUMED:
        return _with_resumed_additions(scenario, planner, random.Random(f"adds/{scenario.seed}"))
    if scenario.seed % _LOST_EVERY == _LEFT:
        return _with_writers_that_leave(scenario, planner, random.Random(f"left/{scenario.seed}"))
    return scenario


def _with_lost_worker(scenario: Scenario, planner: PlannerScenario, rng: random.Random) -> Scenario:
    """One of two workers of a role crashes and does not come back for long. Meanwhile an operator
    wants only one."""
    role = rng.choice(tuple(Role))
    options = replace(planner.options, budget_devices=6, decode_min=1)
    at_s = LOAD_FROM_S + rng.uniform(0.0, 3.0)
    gone_s = scenario.lease_ttl_s + 5.0
    slot = f"{role.word}-{rng.randrange(2)}"
    crash = Fault(at_s=at_s, kind=FaultKind.CRASH, target=slot)
    wish = Wish(at_s=at_s + gone_s, component=role, count=1)
    lost = BadStarts(from_s=at_s, to_s=at_s + gone_s + 4.0, hang=True, restarts=True)
    return replace(
        scenario,
        decode=2,
        prefill=2,
        faults=(crash,),
        quiet_at_s=max(scenario.quiet_at_s, lost.to_s),
        planner=replace(planner, options=options, bad_starts=(lost,), wishes=(wish,), crashes=()),
    )


def _with_withdrawn_starts(
    scenario: Scenario, planner: PlannerScenario, rng: random.Random
) -> Scenario:
    """The starts that an operator wants hang, and the planner is killed when they are withdrawn."""
    options = replace(
        planner.options, budget_devices=8, prefill_max=4, decode_min=1, decode_max=4, start_s=2.0
    )
    at_s = LOAD_FROM_S + rng.uniform(0.5, 3.0)
    wish = Wish(at_s=at_s, component=rng.choice(tuple(Role)), count=4)
    return replace(
        scenario,
        decode=1,
        prefill=1,
        faults=(),
        planner=replace(
            planner,
            options=options,
            devices=10,
            bad_starts=(BadStarts(from_s=at_s, to_s=at_s + 8.0, hang=True),),
            wishes=(wish,),
            crashes=(Step("withdraw", "ordered"), Step("withdraw", "wanted")),
        ),
    )


def _with_resumed_additions(
    scenario: Scenario, planner: PlannerScenario, rng: random.Random
) -> Scenario:
    """An operator wants more workers, and the planner is killed when that is ordered."""
    options = replace(
        planner.options, budget_devices=8, prefill_max=4, decode_min=1, decode_max=4, start_s=2.0
    )
    at_s = LOAD_FROM_S + rng.uniform(0.5, 3.0)
    wishes = tuple(
        Wish(at_s=at_s + rng.uniform(0.0, 6.0), component=component, count=rng.choice((3, 4)))
        for component in Role
    )
    return replace(
        scenario,
        decode=1,
        prefill=1,
        faults=(),
        planner=replace(
            planner,
            options=options,
            devices=10,
            bad_starts=(),
            wishes=tuple(sorted(wishes, key=lambda wish: wish.at_s)),
            crashes=(Step("add", "wanted"), Step("add", "wanted")),
        ),
    )


def _with_writers_that_leave(
    scenario: Scenario, planner: PlannerScenario, rng: random.Random
) -> Scenario:
    """Pods are removed while writes are slow and many clients leave: a worker without requests may
    still be written into, or write."""
    options = replace(planner.options, budget_devices=8, decode_min=1)
    waves = [ask.at_s for ask in scenario.asks]
    wishes = tuple(
        Wish(at_s=rng.choice(waves) + rng.uniform(0.0, 0.5), component=component, count=count)
        for component in Role
        for count in (1, 2, 1)
    )
    asks = tuple(
        replace(ask, cancel_after_s=rng.uniform(0.02, 0.6)) if rng.random() < 0.7 else ask
        for ask in scenario.asks
    )
    return replace(
        scenario,
        decode=2,
        prefill=2,
        slowest_write_s=0.8,
        faults=(),
        asks=asks,
        planner=replace(
            planner,
            pods=True,
            options=options,
            bad_starts=(),
            wishes=tuple(sorted(wishes, key=lambda wish: wish.at_s)),
            crashes=(),
        ),
    )


def _options(scenario: Scenario, rng: random.Random) -> PlannerOptions:
    """The usual options, in seconds instead of minutes."""
    return PlannerOptions(
        budget_devices=max(scenario.decode + scenario.prefill, rng.choice((3, 4, 5, 6))),
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


def _bad_starts(
    waves: Sequence[float], until_s: float, rng: random.Random
) -> tuple[BadStarts, ...]:
    """waves: when the load rises."""
    if rng.random() < 0.5:
        return ()
    from_s = max(rng.choice((*waves, rng.uniform(LOAD_FROM_S, until_s))), LOAD_FROM_S + 1.0)
    to_s = from_s + rng.uniform(1.0, 8.0)
    return (BadStarts(from_s=from_s, to_s=to_s, hang=rng.random() < 0.5),)


def _wishes(options: PlannerOptions, until_s: float, rng: random.Random) -> tuple[Wish, ...]:
    wishes: list[Wish] = []
    for _ in range(rng.choice((0, 1, 2, 3, 4))):
        role = rng.choice(tuple(Role))
        wish = Wish(
            at_s=rng.uniform(LOAD_FROM_S, until_s),
            component=role,
            count=rng.randint(*bounds(options, role)),
        )
        wishes.append(wish)
    return tuple(sorted(wishes, key=lambda wish: wish.at_s))


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
                cancel_after_s=rng.uniform(0.0, 2.0) if rng.random() < 0.15 else None,
            )
            asks.append(ask)
    return asks

"""Draws the scenario of a seed."""

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.engine.model import VOCABULARY, Sampling
from tests.simulation.planner_draw import has_planner, with_planner
from tests.simulation.scenario import LOAD_FROM_S, Ask, Fault, FaultKind, Scenario

#: In one run of five etcd is slow to answer calls that it has applied.
_SLOW_STORE_S = 0.5

_CRASHES = (FaultKind.CRASH, FaultKind.CRASH, FaultKind.ENGINE_CRASH, FaultKind.DRAIN)
_PAUSES = (FaultKind.PAUSE, FaultKind.COMPONENT_PAUSE, FaultKind.ENGINE_PAUSE)
_NETWORK = (FaultKind.ISOLATE, FaultKind.CUT, FaultKind.CUT, FaultKind.WEATHER)
_BROKER = (FaultKind.BROKER_CRASH, FaultKind.BROKER_PAUSE)
_STORE = (FaultKind.STORE_CRASH, FaultKind.STORE_WIPE, FaultKind.STORE_PAUSE)
#: By profile: how often it is drawn, its kinds of faults, and the most of them in one run.
_PROFILES: dict[str, tuple[int, tuple[FaultKind, ...], int]] = {
    "calm": (1, (), 0),
    "crashes": (4, (*_CRASHES, FaultKind.REVOKE), 5),
    "pauses": (4, _PAUSES, 5),
    "zombies": (2, (FaultKind.PAUSE,), 3),
    "network": (4, _NETWORK, 5),
    "servers": (3, (*_BROKER, *_STORE), 3),
    "everything": (8, tuple(FaultKind), 8),
}


def draw(seed: int) -> Scenario:
    rng = random.Random(f"scenario/{seed}")
    weights = [weight for weight, _, _ in _PROFILES.values()]
    profile = rng.choices(list(_PROFILES), weights)[0]
    decode = rng.choices((1, 2, 3), (5, 4, 1))[0]
    prefill = rng.choices((1, 2, 3), (5, 4, 1))[0]
    clients = rng.choices((1, 2), (4, 1))[0]
    lease_ttl_s = rng.choice((3.0, 4.0, 5.0))
    load_s = rng.uniform(5.0, 9.0)
    bursts = [LOAD_FROM_S + rng.uniform(0, load_s) for _ in range(rng.randint(3, 8))]
    scenario = Scenario(
        seed=seed,
        profile=profile,
        decode=decode,
        prefill=prefill,
        clients=clients,
        num_blocks=rng.choice((40, 64, 96, 128)),
        lease_ttl_s=lease_ttl_s,
        remote_prefill_timeout_s=rng.uniform(1.0, 6.0),
        max_jobs=rng.choice((2, 8, 64)),
        slowest_write_s=rng.choice((0.01, 0.1, 0.8)),
        token_s=rng.choice((0.0002, 0.001, 0.004, 0.01)),
        quiet_at_s=LOAD_FROM_S + load_s,
        slowest_store_answer_s=_SLOW_STORE_S * (seed % 5 == 2),
        max_queue_wait_s=random.Random(f"waits/{seed}").choice((0.5, 1.0, 2.0, 10.0)),
        intruded=seed % 5 == 4,
    )
    scenario = replace(scenario, clock_skews=_clock_skews(scenario))
    drawn = _with_load(_with_faults(scenario, bursts, rng), bursts, rng)
    return with_planner(drawn) if has_planner(seed) else drawn


def _clock_skews(scenario: Scenario) -> tuple[tuple[str, float], ...]:
    """Half of all hosts are up to a day ahead or behind, in two runs of three."""
    rng = random.Random(f"clocks/{scenario.seed}")
    if scenario.seed % 3 == 0:
        return ()
    wrong = [slot for slot in scenario.slots if rng.random() < 0.5]
    return tuple((slot, rng.choice((-1, 1)) * 10 ** rng.uniform(-1, 5)) for slot in wrong)


def _with_faults(scenario: Scenario, bursts: Sequence[float], rng: random.Random) -> Scenario:
    _, kinds, most = _PROFILES[scenario.profile]
    count = rng.randint(1, most) if most else 0
    faults = [_fault(scenario, rng.choice(kinds), bursts, rng) for _ in range(count)]
    faults.sort(key=lambda fault: fault.at_s)
    over_s = [fault.at_s + fault.for_s for fault in faults]
    return replace(
        scenario, faults=tuple(faults), quiet_at_s=max(scenario.quiet_at_s, *over_s, 0.0)
    )


def _fault(
    scenario: Scenario, kind: FaultKind, bursts: Sequence[float], rng: random.Random
) -> Fault:
    # Most come while there is work.
    at_s = rng.choice(bursts) + 10 ** rng.uniform(-2, 0.3)
    if scenario.profile == "zombies":
        return _zombie(scenario, at_s, rng)
    if rng.random() < 0.3:
        at_s = rng.uniform(LOAD_FROM_S, scenario.quiet_at_s)
    for_s = _duration(scenario.lease_ttl_s, rng)
    workers = [slot for slot in scenario.slots if not slot.startswith("client")]
    hosts = scenario.slots
    if rng.random() < 0.1:
        workers = hosts
    match kind:
        case FaultKind.CRASH | FaultKind.DRAIN | FaultKind.REVOKE | FaultKind.ENGINE_CRASH:
            return Fault(at_s=at_s, kind=kind, target=rng.choice(workers))
        case FaultKind.PAUSE | FaultKind.COMPONENT_PAUSE | FaultKind.ENGINE_PAUSE:
            return Fault(at_s=at_s, kind=kind, target=rng.choice(workers), for_s=for_s)
        case FaultKind.ISOLATE:
            return Fault(at_s=at_s, kind=kind, target=rng.choice(hosts), for_s=for_s)
        case FaultKind.CUT:
            target, other = rng.sample([*hosts, "nats", "etcd"], 2)
            return Fault(at_s=at_s, kind=kind, target=target, other=other, for_s=for_s)
        case FaultKind.WALL_JUMP:
            jump = rng.choice((-1, 1)) * 10 ** rng.uniform(-1, 4)
            return Fault(at_s=at_s, kind=kind, target=rng.choice(hosts), amount=jump)
        case FaultKind.WEATHER:
            amount = rng.choice((0.02, 0.1, 0.3))
            return Fault(at_s=at_s, kind=kind, for_s=max(for_s, 0.5), amount=amount)
        case _:
            return Fault(at_s=at_s, kind=kind, for_s=for_s)


def _zombie(scenario: Scenario, at_s: float, rng: random.Random) -> Fault:
    """A writer is paused with its job half done, until all others count it as lost."""
    writers = [slot for slot in scenario.slots if slot.startswith("prefill")]
    for_s = _until_given_up(scenario.lease_ttl_s, rng)
    return Fault(at_s=at_s, kind=FaultKind.PAUSE, target=rng.choice(writers), for_s=for_s)


def _until_given_up(lease_ttl_s: float, rng: random.Random) -> float:
    return rng.uniform(3.0, 3.6) * lease_ttl_s + 1.0


def _duration(lease_ttl_s: float, rng: random.Random) -> float:
    """A blink, around a lease's time-to-live, or until everything that hangs on it is over."""
    kind = rng.random()
    if kind < 0.4:
        return rng.uniform(0.01, 0.5)
    if kind < 0.8:
        return rng.uniform(0.3, 1.7) * lease_ttl_s
    return _until_given_up(lease_ttl_s, rng)


def _with_load(scenario: Scenario, bursts: Sequence[float], rng: random.Random) -> Scenario:
    longest = min(120, 4 * (scenario.num_blocks - 1) - 20)
    prefixes = [_tokens(rng, rng.randint(4, longest // 2)) for _ in range(3)]

    def prompt() -> tuple[int, ...]:
        shared = rng.choice(prefixes) if rng.random() < 0.5 else ()
        room = longest - len(shared)
        return shared + _tokens(rng, rng.randint(1, min(room, rng.choice((8, 24, room)))))

    asks: list[Ask] = []
    for number in range(rng.randint(10, 26)):
        at_s = rng.choice(bursts) + abs(rng.gauss(0, 0.2))
        asks.append(ask := _ask(scenario, rng, f"r{number}", prompt(), at_s))
        if ask.cancel_after_s is not None and rng.random() < 0.4:
            # Its client has timed out, and retries with the same id.
            again_s = at_s + ask.cancel_after_s + 10 ** rng.uniform(-3, 0)
            tokens = ask.prompt if rng.random() < 0.5 else prompt()
            asks.append(
                replace(_ask(scenario, rng, ask.request_id, tokens, again_s), client=ask.client)
            )
    asks += _siblings(asks, random.Random(f"siblings/{scenario.seed}"))
    return replace(scenario, asks=tuple(sorted(asks, key=lambda a: a.at_s)))


def _siblings(asks: Sequence[Ask], rng: random.Random) -> list[Ask]:
    """Requests with the same prompt at about the same time, as from `n > 1` or from many
    clients. Some are cancelled early."""
    chosen = rng.sample(asks, rng.randint(0, 2))
    return [
        replace(
            ask,
            request_id=f"{ask.request_id}n{number}",
            at_s=ask.at_s + rng.choice((0.0, 0.0, rng.uniform(0, 0.3))),
            cancel_after_s=rng.choice((None, None, None, rng.uniform(0, 2))),
        )
        for ask in chosen
        for number in range(rng.randint(1, 3))
    ]


def _ask(
    scenario: Scenario, rng: random.Random, request_id: str, prompt: tuple[int, ...], at_s: float
) -> Ask:
    mode = rng.choices(("greedy", "seeded", "plain"), (6, 2, 1))[0]
    sampling = Sampling(
        max_tokens=rng.randint(1, 16),
        temperature=0.0 if mode == "greedy" else 1.0,
        seed=rng.randrange(1000) if mode == "seeded" else None,
    )
    cancel = None
    if rng.random() < 0.25:
        cancel = rng.choice((10 ** rng.uniform(-4, 0), rng.uniform(0, 1), rng.uniform(0, 8)))
    return Ask(
        at_s=at_s,
        client=rng.randrange(scenario.clients),
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        timeout_s=rng.uniform(12.0, 25.0),
        cancel_after_s=cancel,
    )


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))

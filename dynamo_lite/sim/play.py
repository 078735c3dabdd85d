"""Plays one seed: starts its cluster, lets happen what shall, and judges how it ended."""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from dynamo_lite.sim.loop import START_S, SimulationStuck, VirtualLoop
from dynamo_lite.sim.scenario import LOAD_FROM_S, Fault, Scenario, draw
from dynamo_lite.sim.shipped import Shipped
from dynamo_lite.sim.trace import Trace, log_to
from dynamo_lite.sim.world import World

#: After the last fault, and the last request's deadline, everything must be settled
#: within this time: leases and quarantines run out, backoffs end.
_SETTLE_S = 60.0
_LOOK_S = 0.25
_STOP_S = 40.0


@dataclass
class Outcome:
    """What came of a seed. violations: empty when every invariant held.

    virtual_s: how long it took in virtual time. fingerprint: equal for equal runs.
    """

    seed: int
    scenario: Scenario
    violations: list[str] = field(default_factory=list[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    virtual_s: float = 0.0
    fingerprint: str = ""


def play(seed: int, *, shipped: Shipped | None = None, trace: Trace | None = None) -> Outcome:
    scenario = draw(seed)
    trace = trace or Trace()
    outcome = Outcome(seed, scenario)
    with VirtualLoop(seed, trace=trace) as loop, log_to(trace, logging.INFO):
        world = World(loop, scenario, shipped or Shipped())
        try:
            loop.run_until_complete(_play(world))
        except SimulationStuck as exc:
            world.judge.violate(str(exc))
        for failure in loop.failures:
            world.judge.violate(failure)
        outcome.violations, outcome.counts = world.judge.violations, world.judge.counts
        outcome.virtual_s = loop.time() - START_S
        outcome.fingerprint = loop.fingerprint()
    return outcome


async def _play(world: World) -> None:
    loop, scenario = world.loop, world.scenario
    world.start()
    begin = loop.time()
    faults = [
        loop.create_task(_carry_out(world, fault), name=str(fault)) for fault in scenario.faults
    ]
    for fault in scenario.faults:
        world.judge.counts[f"fault {fault.kind.value}"] += 1
    for ask in scenario.asks:
        loop.call_at(begin + ask.at_s, world.ask, ask)
    await asyncio.sleep(max(scenario.quiet_at_s, LOAD_FROM_S))
    await asyncio.gather(*faults)
    await _settle(world)
    await _stop(world)
    world.judge.judge_stories(world.sabotage.held_up_s)


async def _carry_out(world: World, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    await world.sabotage.carry_out(fault)


async def _settle(world: World) -> None:
    longest_s = max((ask.timeout_s for ask in world.scenario.asks), default=0.0)
    until = world.loop.time() + longest_s + _SETTLE_S
    while (left := world.unsettled()) is not None:
        if world.loop.time() > until:
            world.judge.violate(
                f"not settled {longest_s + _SETTLE_S:.0f} s after the last fault: {left}"
            )
            return
        await asyncio.sleep(_LOOK_S)
    world.judge.check_caches()


async def _stop(world: World) -> None:
    """As the supervisor does: callers before callees."""
    for kind in ("client", "decode", "prefill"):
        names = [name for name in world.slots if name.startswith(kind)]
        await world.stop(names, _STOP_S)
    # Whoever was killed has left its keys to its lease.
    for _ in range(8):
        if not world.etcd.keys():
            return
        await asyncio.sleep(1.0)
    if keys := world.etcd.keys():
        world.judge.violate(f"left in the store: {keys}")

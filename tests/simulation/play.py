"""Plays one seed: starts its cluster, runs the scenario, and checks the invariants."""

import asyncio
import logging
import traceback

import msgspec

from tests.simulation.draw import draw
from tests.simulation.loop.loop import START_S, SimulationStuck, VirtualLoop
from tests.simulation.loop.trace import Trace, log_to
from tests.simulation.scenario import LOAD_FROM_S, Fault, Scenario
from tests.simulation.shipped import Shipped
from tests.simulation.tally import Played, Waits
from tests.simulation.world import World

#: The graph must be settled within this time after the last fault and the last request's deadline:
#: leases and quarantines expire, backoffs end.
_SETTLE_S = 60.0
_LOOK_S = 0.25
_STOP_S = 40.0


def play(seed: int, *, shipped: Shipped | None = None, trace: Trace | None = None) -> Played:
    """`violations` of the result is empty when every invariant held."""
    return play_scenario(draw(seed), shipped=shipped, trace=trace)


def play_scenario(
    scenario: Scenario, *, shipped: Shipped | None = None, trace: Trace | None = None
) -> Played:
    trace = trace or Trace()
    with VirtualLoop(scenario.seed, trace=trace) as loop, log_to(trace, logging.INFO):
        # A separate call: the loop collects garbage when it closes, and the world must be
        # garbage by then.
        return _judged(loop, scenario, shipped or Shipped(), trace)


def _judged(loop: VirtualLoop, scenario: Scenario, shipped: Shipped, trace: Trace) -> Played:
    world = World(loop, scenario, shipped)
    judge = world.judge
    try:
        loop.run_until_complete(_play(world))
    except SimulationStuck as exc:
        judge.violate(str(exc))
    except Exception as exc:
        judge.violate(f"the simulation itself failed: {exc!r}")
        for line in traceback.format_exc().splitlines():
            trace.add(line)
    for failure in loop.failures:
        judge.violate(failure)
    waits = Waits()
    for wait in (judge.requests.waits.longest, judge.requests.waits.latest):
        if wait is not None:
            waits.add(msgspec.structs.replace(wait, seed=scenario.seed))
    return Played(
        seed=scenario.seed,
        profile=scenario.profile,
        violations=judge.violations,
        counts=dict(judge.counts),
        waits=waits,
        cancel_s=judge.cancels.longest_s,
        virtual_s=loop.time() - START_S,
        fingerprint=loop.fingerprint(),
    )


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
    world.judge.requests.judge(world.faults.held_up_s)
    world.judge.judge_cancels()


async def _carry_out(world: World, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    await world.faults.inject(fault)


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
    """Stops the components as the supervisor does: callers before callees."""
    for kind in ("planner", "client", "decode", "prefill"):
        names = [name for name in world.slots if name.startswith(kind)]
        if names:
            await world.stop(names, _STOP_S)
    # The keys of killed processes go with their leases.
    for _ in range(8):
        if not world.left_keys():
            return
        await asyncio.sleep(1.0)
    if keys := world.left_keys():
        world.judge.violate(f"left in the store: {keys}")

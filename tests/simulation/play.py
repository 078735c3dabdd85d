"""Plays seeds: starts the cluster of each, runs its scenario, and checks the invariants."""

import asyncio
import multiprocessing
import os
import traceback
from collections import Counter, deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.draw import draw
from tests.simulation.loop.loop import Trace, VirtualLoop, log_to, sweep
from tests.simulation.loop.process import SimulationStuck
from tests.simulation.mutants import MUTANTS
from tests.simulation.scenario import LOAD_FROM_S, Fault, Scenario
from tests.simulation.shipped import Shipped
from tests.simulation.world import World

#: The graph must be settled within this time after the last fault and the last request's deadline:
#: leases and quarantines expire, backoffs end.
_SETTLE_S = 60.0
_LOOK_S = 0.25
_STOP_S = 40.0
#: A sweep looks at all modules' objects, and takes a third of the time of a seed.
_SWEEP_EVERY = 64


@dataclass(frozen=True, kw_only=True)
class Played:
    """The result of one seed. Times are virtual."""

    seed: int
    violations: list[str]
    counts: dict[str, int]
    #: The longest time of a request.
    longest_wait_s: float
    #: The longest time that a cancel needed to reach a prefill worker.
    cancel_s: float
    fingerprint: str


@dataclass
class Tally:
    """The results of many seeds."""

    seeds: int = 0
    #: Seed to its first violation.
    violated: dict[int, str] = field(default_factory=dict[int, str])
    counts: Counter[str] = field(default_factory=Counter[str])
    cancel_s: float = 0.0

    def add(self, played: Played) -> None:
        self.seeds += 1
        self.cancel_s = max(self.cancel_s, played.cancel_s)
        self.counts.update(played.counts)
        if played.violations:
            self.violated[played.seed] = played.violations[0]


def violated_lines(seed: int, why: str, mutant: str | None = None) -> list[str]:
    """With the command that repeats the seed and prints its trace."""
    more = f" --mutant {mutant}" if mutant else ""
    return [f"seed {seed}: {why}", f"    python -m tests.simulation --seed {seed}{more}"]


def play_many(seeds: range, mutant: str | None = None) -> Generator[Played, None, None]:
    """The outcomes in the order of the seeds, which are played in a process for each core. Close it
    to stop before the end."""
    cores = os.cpu_count() or 1
    pool = ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"))
    playing: deque[Future[Played]] = deque()
    try:
        for seed in seeds:
            playing.append(pool.submit(_play_here, seed, mutant))
            if len(playing) > 2 * cores:
                yield playing.popleft().result()
        while playing:
            yield playing.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _play_here(seed: int, mutant: str | None) -> Played:
    if seed % _SWEEP_EVERY == 0:
        sweep()
    return play(seed, shipped=MUTANTS[mutant].parts if mutant else None)


def play(seed: int, *, shipped: Shipped | None = None, trace: Trace | None = None) -> Played:
    """`violations` of the result is empty when every invariant held."""
    return play_scenario(draw(seed), shipped=shipped, trace=trace)


def play_scenario(
    scenario: Scenario, *, shipped: Shipped | None = None, trace: Trace | None = None
) -> Played:
    trace = trace or Trace()
    with VirtualLoop(scenario.seed, trace=trace) as loop, log_to(trace):
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
    return Played(
        seed=scenario.seed,
        violations=judge.violations,
        counts=dict(judge.counts),
        longest_wait_s=judge.requests.longest_wait_s,
        cancel_s=judge.cancels.longest_s,
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
        slots = [slot for name, slot in world.slots.items() if name.startswith(kind)]
        if slots:
            await world.stop(slots, _STOP_S)
    # The keys of killed processes go with their leases.
    for _ in range(8):
        if not world.left_keys():
            return
        await asyncio.sleep(1.0)
    if keys := world.left_keys():
        world.judge.violate(f"left in the store: {keys}")

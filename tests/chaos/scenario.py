"""One failure, or one kind of mischief, under a steady load that must not notice."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from tests.chaos.arena import Arena
from tests.chaos.blows import Blows
from tests.chaos.load import Load
from tests.chaos.report import Report

#: Load before and after what is done.
STEADY_S = 4.0


@dataclass(frozen=True)
class Scene:
    """What a scenario works with."""

    arena: Arena
    blows: Blows
    report: Report
    load: Load


async def until_it_works(status_url: str) -> None:
    """Returns when the prefill worker has a job. Raises TimeoutError."""
    async with asyncio.timeout(30), httpx.AsyncClient(timeout=5) as http:
        while not (await http.get(f"{status_url}/health")).json().get("jobs"):
            await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Scenario:
    """what: one line of description. calm: no process may end because of it. clients: how many
    clients send requests meanwhile."""

    name: str
    what: str
    body: Callable[[Scene], Awaitable[None]]
    calm: bool = False
    clients: int = 6


async def play(arena: Arena, scenario: Scenario, seed: int) -> Report:
    """Nothing that the load asks may be refused, lost or wrong."""
    report = Report(what=f"scenario {scenario.name}", seed=seed, refusals_allowed=False)
    blows = Blows(arena.cluster, random.Random(seed), arena.say)

    async def body(load: Load) -> None:
        await asyncio.sleep(STEADY_S)
        began = time.monotonic()
        try:
            await scenario.body(Scene(arena, blows, report, load))
        except TimeoutError as exc:
            report.trouble.append(str(exc))
        arena.say(f"{scenario.name}: over after {time.monotonic() - began:.1f} s")
        await asyncio.sleep(STEADY_S)

    await arena.run(report, body, clients=scenario.clients, cancels=0.0)
    report.blows = dict(blows.counts)
    if scenario.calm and report.exits:
        report.trouble.append(f"processes ended: {report.exits}")
    return report

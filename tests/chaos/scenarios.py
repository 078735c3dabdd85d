"""One failure, or one kind of mischief, under a steady load that must not notice."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from dynamo_lite.protocol import names
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.chaos.arena import Arena
from tests.chaos.blows import Blows
from tests.chaos.client import ask
from tests.chaos.cluster import PREFILL, ROUTER
from tests.chaos.load import Load
from tests.chaos.report import Report
from tests.vllm.asking import prompt_ids
from tests.vllm.graph import NAMESPACE

#: Load before and after what is done.
_STEADY_S = 4.0

_LEAVERS = 8
#: Stays so long that its claims are given up, and clients leave meanwhile, too.
_HELD_S = 5.0
_TRIES = 40
_LONG_TOKENS = 7000


@dataclass(frozen=True)
class Scene:
    """What a scenario works with."""

    arena: Arena
    blows: Blows
    report: Report
    load: Load


Scenario = Callable[[Scene], Awaitable[None]]


async def play(
    arena: Arena, name: str, scenario: Scenario, seed: int, *, calm: bool = False, clients: int = 6
) -> Report:
    """Nothing that the load asks may be refused, lost or wrong. calm: no process may end because
    of it. clients: how many clients send requests meanwhile."""
    report = Report(what=f"scenario {name}", seed=seed, refusals_allowed=False)
    blows = Blows(arena.cluster, random.Random(seed), arena.say)

    async def body(load: Load) -> None:
        await asyncio.sleep(_STEADY_S)
        try:
            await scenario(Scene(arena, blows, report, load))
        except TimeoutError as exc:
            report.trouble.append(str(exc))
        await asyncio.sleep(_STEADY_S)

    await arena.run(report, body, clients=clients, cancels=0.0)
    report.blows = dict(blows.counts)
    if calm and report.exits:
        report.trouble.append(f"processes ended: {report.exits}")
    return report


async def router_killed(scene: Scene) -> None:
    """Requests are placed by turns meanwhile, and by the new Router once it is up."""
    meters = scene.arena.meters
    await meters.ask()
    by_turns = meters.total("router_fallbacks")
    victim = scene.blows.pick(ROUTER)
    await scene.blows.kill(victim, "kill Router")
    await scene.blows.back(victim)
    await meters.ask()
    by_router = meters.total("router_choices")
    await asyncio.sleep(_STEADY_S)
    await meters.ask()
    if meters.total("router_fallbacks") == by_turns:
        scene.report.trouble.append("no request was placed while the Router was away")
    if meters.total("router_choices") == by_router:
        scene.report.trouble.append("the new Router has placed no request")


async def nats_killed(scene: Scene) -> None:
    nats = scene.arena.cluster.nats
    for seconds in (0.0, 1.0, 5.0):
        await nats.kill()
        scene.blows.hit("kill nats-server", f"for {seconds:g} s")
        await asyncio.sleep(seconds)
        await nats.restart()
        await asyncio.sleep(_STEADY_S)


# Clients leave at every moment of a remote prefill. Nothing may leak, the remaining clients get
# the right tokens (which would show blocks that were freed too early), and the writer gets the
# cancel soon.


async def leave_often(scene: Scene, cancels: int) -> None:
    """Long prompts with clients that disconnect early: in the queue, during computing and
    writing, and while their attempt's blocks are in quarantine."""
    tally, rng = scene.load.tally, scene.blows.rng
    until = tally.cancelled + cancels
    long = [q for q in scene.arena.asked if q.prompt_tokens > 400]

    async def leaver() -> None:
        while tally.cancelled < until:
            await scene.load.one(rng.choice(long), rng.choice((0.06, 0.4, 1.2)) * rng.random())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_LEAVERS):
            tasks.create_task(leaver())
        tasks.create_task(_hold_once(scene, until - cancels // 2))


async def _hold_once(scene: Scene, at: int) -> None:
    """Stops the prefill worker for a while when half of the clients have left."""
    await scene.arena.cluster.until(
        lambda: scene.load.tally.cancelled >= at, timeout_s=120, what="half of the cancels"
    )
    victim = scene.blows.pick(PREFILL)
    scene.blows.hit("stop prefill", f"for {_HELD_S:g} s")
    await scene.blows.hold([victim.state.pid, victim.engine_pid], _HELD_S)


async def reach_times(scene: Scene, wanted: int, within_s: float) -> list[float]:
    """Seconds from a client's leave to the writer's notice, for jobs under way. Cancels that take
    longer than twice `within_s` are not counted."""
    url = scene.blows.pick(PREFILL).state.status_url
    told: asyncio.Queue[float] = asyncio.Queue()

    async def on_cancel(_: object) -> None:
        told.put_nowait(time.monotonic())

    subject = names.cancel_subject(NAMESPACE, 1).replace(".1.", ".*.")
    delays: list[float] = []
    async with NatsMessaging(scene.arena.cluster.nats.url) as messaging:
        await messaging.client.subscribe(subject, cb=on_cancel)
        await messaging.client.flush()
        for number in range(_TRIES):
            if len(delays) == wanted:
                break
            while not told.empty():
                told.get_nowait()
            left = await _leave_amid_work(scene, url, number)
            with contextlib.suppress(TimeoutError):
                delays.append(await asyncio.wait_for(told.get(), 2 * within_s) - left)
    return delays


async def _leave_amid_work(scene: Scene, url: str, number: int) -> float:
    """Sends a long prompt, disconnects when the prefill worker works on it, and returns when."""
    rng = random.Random(number)
    prompt = prompt_ids(_LONG_TOKENS, seed=rng.getrandbits(30))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": True}
    asking = asyncio.create_task(ask(scene.arena.cluster.port, body))
    working = asyncio.create_task(_until_it_works(url))
    await asyncio.wait({asking, working}, return_when=asyncio.FIRST_COMPLETED)
    working.cancel()
    await asyncio.sleep(rng.uniform(0.02, 0.3))
    asking.cancel()
    left = time.monotonic()
    await asyncio.gather(asking, working, return_exceptions=True)
    return left


async def _until_it_works(status_url: str) -> None:
    """Returns when the prefill worker has a job. Raises TimeoutError."""
    async with asyncio.timeout(30), httpx.AsyncClient(timeout=5) as http:
        while not (await http.get(f"{status_url}/health")).json().get("jobs"):
            await asyncio.sleep(0.005)

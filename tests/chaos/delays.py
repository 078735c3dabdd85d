"""Scenarios that measure how long clients wait because of a failure."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import httpx

from tests.chaos.cluster import FRONTEND, PREFILL
from tests.chaos.questions import Question
from tests.chaos.scenario import Scenario, Scene, until_it_works

_CLIENTS = 6
#: Longer prompts are prefilled remotely (`max-local-prefill-length` in configs/chaos.yaml).
_REMOTE_TOKENS = 256
#: How often each question is asked, with and without the kill.
_ROUNDS = 2
#: Aim for the longest answer, beyond that of the same load without the kill.
_LONGER_S = 2.0

_FROZEN_S = 10.0


async def _longest(scene: Scene, asked: Sequence[Question]) -> float:
    """Asks in this order, `_CLIENTS` at a time. Returns how long the longest answer took."""
    left, took = deque(asked), list[float]()

    async def client() -> None:
        while left:
            began, question = time.monotonic(), left.popleft()
            if await scene.load.one(question) is not None:
                took.append(time.monotonic() - began)

    async with asyncio.TaskGroup() as clients:
        for _ in range(_CLIENTS):
            clients.create_task(client())
    return max(took)


async def _prefill_killed(scene: Scene) -> None:
    """It asks all questions itself, so that both times are those of the same load."""
    # Without the families: what the caches know of their prefixes depends on the time.
    remote = [q for q in scene.arena.asked if q.prompt_tokens > _REMOTE_TOKENS and not q.family]
    asked = remote * _ROUNDS
    scene.blows.rng.shuffle(asked)
    calm = await _longest(scene, asked)
    victim = scene.blows.pick(PREFILL)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(_longest(scene, asked))
        await until_it_works(victim.state.status_url)
        await scene.blows.kill(victim, f"kill {PREFILL}")
    hit = asking.result()
    await scene.blows.back(victim)
    scene.report.facts["longest answer"] = (
        f"{hit:.2f} s; without the kill {calm:.2f} s; aim: at most {_LONGER_S:g} s more"
        + ("" if hit - calm <= _LONGER_S else ": MISSED")
    )


async def _nats_frozen(scene: Scene) -> None:
    """The longest gap in a stream is in the report. The Frontend serves requests, and shows that
    the broker is away."""
    nats = scene.arena.cluster.nats
    nats.freeze()
    scene.blows.hit("freeze nats-server", f"for {_FROZEN_S:g} s")
    try:
        await asyncio.sleep(_FROZEN_S)
        url = scene.blows.pick(FRONTEND).state.status_url
        async with httpx.AsyncClient(timeout=5) as http:
            ready = (await http.get(f"{url}/ready")).json()
            health = (await http.get(f"{url}/health")).json()
    finally:
        nats.thaw()
    if not ready["ok"] or "NATS is not connected" not in ready["checks"]["broker"]["detail"]:
        scene.report.trouble.append(f"/ready of the Frontend without NATS: {ready}")
    if health["nats_connected"]:
        scene.report.trouble.append("/health of the Frontend does not show that NATS is away")


DELAYS = (
    Scenario(
        "prefill-killed", "the only prefill worker is killed (-9)", _prefill_killed, clients=0
    ),
    Scenario("nats-frozen", f"nats-server is stopped for {_FROZEN_S:g} s", _nats_frozen, calm=True),
)

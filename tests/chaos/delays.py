"""Scenario: how long clients wait because the only prefill worker is killed."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from tests.chaos.cluster import PREFILL
from tests.chaos.questions import Question
from tests.chaos.scenario import Scenario, Scene, until_it_works

_CLIENTS = 6
#: Longer prompts are prefilled remotely (`max-local-prefill-length` in configs/chaos.yaml).
_REMOTE_TOKENS = 256
#: How often each question is asked, with and without the kill.
_ROUNDS = 2
#: Aim for the longest answer, beyond that of the same load without the kill.
_LONGER_S = 2.0


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


async def _body(scene: Scene) -> None:
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


PREFILL_KILLED = Scenario(
    "prefill-killed", "the only prefill worker is killed (-9)", _body, clients=0
)

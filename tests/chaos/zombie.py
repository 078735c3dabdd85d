"""Scenario: a prefill worker resumes during its writes when its lease is gone."""

import asyncio
import time

import httpx

from tests.chaos.blows import Blows
from tests.chaos.cluster import PREFILL, Member
from tests.chaos.scenario import Scenario, Scene, until_it_works
from tests.vllm.asking import prompt_ids
from tests.vllm.graph import sample_sum

_PROMPT_TOKENS = 7000
_PROMPTS = 2
#: Beyond the end of the lease.
_LONGER_S = 2.0
#: The engine continues for this long before its component can get its counts.
_ALONE_S = 1.5

FENCED = "dynamo_lite_fenced_writes_total"


async def _body(scene: Scene) -> None:
    victim = scene.blows.pick(PREFILL)
    restarts, late = victim.state.restarts, scene.arena.meters.total("late_notices")
    async with asyncio.TaskGroup() as tasks:
        for number in range(_PROMPTS):
            tasks.create_task(_ask_long(scene, number))
        fenced = await asyncio.wait_for(_sleep_past_lease(scene.blows, victim), 90)
    scene.report.facts["writes after the end of the lease"] = f"{fenced} refused by the fence"
    await scene.arena.cluster.until(
        lambda: victim.state.restarts > restarts, timeout_s=60, what="the zombie leaves"
    )
    await scene.blows.back(victim)
    await scene.arena.meters.ask()
    if not fenced:
        scene.report.trouble.append("no write was pending when the worker woke up")
    if (written := scene.arena.meters.total("late_notices") - late) > 0:
        scene.report.trouble.append(f"{written} commits came from a writer without lease")


async def _ask_long(scene: Scene, number: int) -> None:
    """The client gets its answer in any case, computed locally."""
    prompt = prompt_ids(_PROMPT_TOKENS, seed=900 + number)
    async with httpx.AsyncClient(timeout=120) as http:
        url = f"http://127.0.0.1:{scene.arena.cluster.port}/v1/completions"
        answer = await http.post(url, json={"model": "tiny", "prompt": prompt, "max_tokens": 4})
    if answer.status_code != 200:
        scene.report.trouble.append(f"a prompt that the zombie had: {answer.text[:300]}")


async def _sleep_past_lease(blows: Blows, victim: Member) -> int:
    """Stops component and engine during a job; the engine resumes first. Returns how many
    writes were refused, if the component lives long enough to report it."""
    state, engine = victim.state, victim.engine_pid
    await until_it_works(state.status_url)
    await asyncio.sleep(0.05)
    lease_s = await asyncio.to_thread(
        sample_sum, state.status_url, "dynamo_lite_lease_remaining_seconds"
    )
    seconds = lease_s + _LONGER_S
    blows.hit("stop prefill past its lease", f"{victim.name} for {seconds:.1f} s")
    component = asyncio.create_task(blows.hold([state.pid], seconds + _ALONE_S))
    await blows.hold([engine], seconds)
    await component
    return await _refused(state.status_url)


async def _refused(url: str) -> int:
    """The highest count that is seen until the component has left."""
    seen, deadline = 0, time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            seen = max(seen, int(await asyncio.to_thread(sample_sum, url, FENCED)))
        except httpx.HTTPError:
            break
        await asyncio.sleep(0.02)
    return seen


ZOMBIE = Scenario("zombie", "a prefill worker sleeps past its lease amid its writes", _body)

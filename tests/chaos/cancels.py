"""Scenario: clients leave at every moment of a remote prefill.

Nothing may leak, the remaining clients get the right tokens (which would show blocks that were
freed too early), and the writer stops soon.
"""

import asyncio
import contextlib
import random
import time

from nats.aio.msg import Msg

from dynamo_lite.disagg.attempts.ledger import CLAIM_S
from dynamo_lite.protocol import names
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.chaos.client import ask
from tests.chaos.cluster import PREFILL
from tests.chaos.scenario import Scenario, Scene, until_it_works
from tests.vllm.asking import prompt_ids
from tests.vllm.graph import NAMESPACE

_CANCELS = 500
_LEAVERS = 8
#: Stays so long that its claims are given up, and clients leave meanwhile, too.
_HELD_S = 5.0

_MEASURED = 12
_TRIES = 40
#: The writer's next renewal is refused. Then it stops.
REACHED_S = CLAIM_S / 3 + 1.0
_LONG_TOKENS = 7000


async def _body(scene: Scene) -> None:
    await leave_often(scene, _CANCELS)
    delays = await reach_times(scene, _MEASURED)
    scene.report.facts["the prefill worker stops after its client has left"] = (
        f"in {max(delays, default=0):.3f} s at most, {len(delays)} measured"
    )
    if len(delays) < _MEASURED // 2 or max(delays) > REACHED_S:
        scene.report.trouble.append(f"prefill workers stopped {delays} s after their clients left")


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


async def reach_times(scene: Scene, wanted: int) -> list[float]:
    """Seconds from a client's leave to the word of its writer that it has stopped."""
    url = scene.blows.pick(PREFILL).state.status_url
    told: asyncio.Queue[float] = asyncio.Queue()

    async def on_done(message: Msg) -> None:
        if b"abandoned" in message.data:
            told.put_nowait(time.monotonic())

    subject = names.done_subject(NAMESPACE, "*")
    delays: list[float] = []
    async with NatsMessaging(scene.arena.cluster.nats.url) as messaging:
        await messaging.client.subscribe(subject, cb=on_done)
        await messaging.client.flush()
        for number in range(_TRIES):
            if len(delays) == wanted:
                break
            while not told.empty():
                told.get_nowait()
            left = await _leave_amid_work(scene, url, number)
            with contextlib.suppress(TimeoutError):
                delays.append(await asyncio.wait_for(told.get(), 2 * REACHED_S) - left)
    return delays


async def _leave_amid_work(scene: Scene, url: str, number: int) -> float:
    """Sends a long prompt, disconnects when the prefill worker works on it, and returns when."""
    rng = random.Random(number)
    prompt = prompt_ids(_LONG_TOKENS, seed=rng.getrandbits(30))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": True}
    asking = asyncio.create_task(ask(scene.arena.cluster.port, body))
    working = asyncio.create_task(until_it_works(url))
    await asyncio.wait({asking, working}, return_when=asyncio.FIRST_COMPLETED)
    working.cancel()
    await asyncio.sleep(rng.uniform(0.02, 0.3))
    asking.cancel()
    left = time.monotonic()
    await asyncio.gather(asking, working, return_exceptions=True)
    return left


CANCELS = Scenario("cancels", f"{_CANCELS} clients leave at random moments", _body, clients=3)

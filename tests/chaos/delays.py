"""Scenarios that measure how long clients wait because of a failure.

They ask all questions themselves (`Scenario.clients` is 0), so that the times with and
without the failure are those of the same load.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx

from tests.chaos.cluster import DECODE, FRONTEND, PREFILL
from tests.chaos.questions import Question
from tests.chaos.scenario import STEADY_S, Scenario, Scene

_CLIENTS = 6
#: Longer prompts are prefilled remotely (`max-local-prefill-length` in configs/chaos.yaml).
_REMOTE_TOKENS = 256
#: How often each question is asked, with and without the kill.
_ROUNDS = 2
#: Aim for the longest answer, beyond that of the same load without the kill.
_LONGER_S = 2.0
#: Aim for the end of the killed worker's remote prefills: their prompts go on then.
_GOES_ON_S = 1.0
#: How long these ends are looked for.
_LOOK_S = 10.0

_FROZEN_S = 10.0
#: Aim for each gap while the broker is frozen.
_GAP_S = 1.0


@dataclass(frozen=True)
class Timed:
    """One answer. Times are of `time.monotonic()`; arrivals: of the pieces of a stream."""

    name: str
    began: float
    ended: float
    arrivals: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def longest(answers: Iterable[Timed]) -> Timed:
    return max(answers, key=lambda answer: answer.seconds)


def longest_gap(arrivals: Iterable[float], start: float, end: float) -> float:
    """The longest time between two arrivals, of those that overlap the time from start to end."""
    gaps = (b - a for a, b in pairwise(sorted(arrivals)) if b > start and a < end)
    return max(gaps, default=0.0)


async def ask_all(scene: Scene, asked: Iterable[Question]) -> list[Timed]:
    """Asks in this order, `_CLIENTS` at a time."""
    left, answers = deque(asked), list[Timed]()

    async def client() -> None:
        while left:
            await _ask(scene, left.popleft(), answers)

    async with asyncio.TaskGroup() as clients:
        for _ in range(_CLIENTS):
            clients.create_task(client())
    return answers


async def _ask(scene: Scene, question: Question, answers: list[Timed]) -> None:
    began = time.monotonic()
    if (answer := await scene.load.one(question)) is not None:
        timed = Timed(question.name, began, time.monotonic(), tuple(answer.arrivals))
        answers.append(timed)


# The prefill worker is killed


async def _prefill_killed(scene: Scene) -> None:
    # Without the families: what the caches know of their prefixes depends on the time.
    remote = [q for q in scene.arena.asked if q.prompt_tokens > _REMOTE_TOKENS and not q.family]
    asked = remote * _ROUNDS
    scene.blows.rng.shuffle(asked)
    calm = longest(await ask_all(scene, asked))
    victim = scene.blows.pick(PREFILL)
    async with httpx.AsyncClient(timeout=5) as http, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask_all(scene, asked))
        await _until_it_works(http, victim.state.status_url)
        before = await _lost_writers(http, scene)
        looking = tasks.create_task(_ends_of_lost(http, scene, before))
        await scene.blows.kill(victim, f"kill {PREFILL}")
    hit = longest(asking.result())
    await scene.blows.back(victim)
    scene.report.facts["longest answer"] = (
        f"{hit.seconds:.2f} s ({hit.name}); without the kill {calm.seconds:.2f} s ({calm.name}); "
        + _aim(hit.seconds - calm.seconds, _LONGER_S, "more")
    )

    if ends := looking.result():
        scene.report.facts["its remote prefills ended"] = (
            f"{len(ends)}, {ends[0]:.2f} to {ends[-1]:.2f} s after the kill; "
            + _aim(ends[-1], _GOES_ON_S)
        )


async def _ends_of_lost(http: httpx.AsyncClient, scene: Scene, before: int) -> list[float]:
    """Seconds from now until each remote prefill that lost its writer was ended by its decode
    worker."""
    began, ends = time.monotonic(), list[float]()
    while (elapsed := time.monotonic() - began) < _LOOK_S:
        ends += [elapsed] * (await _lost_writers(http, scene) - before - len(ends))
        await asyncio.sleep(0.01)
    return ends


async def _lost_writers(http: httpx.AsyncClient, scene: Scene) -> int:
    """Remote prefills that lost their writer, by all decode workers' counters."""
    name, count = 'dynamo_lite_remote_prefills_total{outcome="writer_lost"} ', 0
    for worker in scene.arena.cluster.members(DECODE):
        text = (await http.get(f"{worker.state.status_url}/metrics")).text
        found = [line for line in text.splitlines() if line.startswith(name)]
        count += sum(int(float(line.removeprefix(name))) for line in found)
    return count


async def _until_it_works(http: httpx.AsyncClient, status_url: str) -> None:
    """Returns when the prefill worker has a job."""
    async with asyncio.timeout(30):
        while not (await http.get(f"{status_url}/health")).json().get("jobs"):
            await asyncio.sleep(0.005)


# The broker is frozen


async def _nats_frozen(scene: Scene) -> None:
    answers, stop = list[Timed](), asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            await _ask(scene, scene.blows.rng.choice(scene.arena.asked), answers)

    async with asyncio.TaskGroup() as clients:
        for _ in range(_CLIENTS):
            clients.create_task(client())
        start = time.monotonic()
        await asyncio.sleep(_FROZEN_S)
        frozen = time.monotonic()
        await _freeze(scene)
        await asyncio.sleep(STEADY_S)
        end = time.monotonic()
        stop.set()
    scene.report.facts |= frozen_facts(answers, start, frozen, end)


def frozen_facts(
    answers: Sequence[Timed], start: float, frozen: float, end: float
) -> dict[str, str]:
    """The longest delays from `frozen` to `end`, and those from `start` to `frozen`."""
    facts: dict[str, str] = {}
    for what, streams, aim in (
        ("longest gap in a stream", [a.arrivals for a in answers], True),
        ("longest time without any token", [[t for a in answers for t in a.arrivals]], True),
        ("longest wait for a first token", [(a.began, *a.arrivals[:1]) for a in answers], False),
    ):
        before, gap = _longest(streams, start, frozen), _longest(streams, frozen, end)
        facts[what] = f"{gap:.2f} s; before {before:.2f} s"
        facts[what] += f"; {_aim(gap, _GAP_S)}" if aim else ""
    return facts


async def _freeze(scene: Scene) -> None:
    nats = scene.arena.cluster.nats
    nats.freeze()
    scene.blows.hit("freeze nats-server", f"for {_FROZEN_S:g} s")
    try:
        await asyncio.sleep(_FROZEN_S)
        await _check_ready(scene)
    finally:
        nats.thaw()


async def _check_ready(scene: Scene) -> None:
    """The Frontend serves requests, and shows that the broker is away."""
    url = scene.blows.pick(FRONTEND).state.status_url
    async with httpx.AsyncClient(timeout=5) as http:
        ready = (await http.get(f"{url}/ready")).json()
        health = (await http.get(f"{url}/health")).json()
    if not ready["ok"] or "NATS is not connected" not in ready["checks"]["broker"]["detail"]:
        scene.report.trouble.append(f"/ready of the Frontend without NATS: {ready}")
    if health["nats_connected"]:
        scene.report.trouble.append("/health of the Frontend does not show that NATS is away")


def _longest(streams: Sequence[Iterable[float]], start: float, end: float) -> float:
    return max((longest_gap(stream, start, end) for stream in streams), default=0.0)


def _aim(seconds: float, most_s: float, more: str = "") -> str:
    aim = f"aim: at most {most_s:g} s {more}".strip()
    return aim if seconds <= most_s else f"{aim}: MISSED"


DELAYS = (
    Scenario(
        "prefill-killed", "the only prefill worker is killed (-9)", _prefill_killed, clients=0
    ),
    Scenario(
        "nats-frozen",
        f"nats-server is stopped for {_FROZEN_S:g} s",
        _nats_frozen,
        calm=True,
        clients=0,
    ),
)

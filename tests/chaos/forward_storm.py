"""A Forwarder under load whose stock engines are killed at each stage of a request.

An engine is struck at a moment of one of its legs, as the Forwarder counts them: when it begins,
while it runs, when it has ended. The legs of a prefill engine are whole prefills: killed when one
has ended, it takes the KV with it that the decode engine is about to read. Between the kill and the
next health check, requests meet an engine that is gone before their leg begins. At most one decode
engine is down at a time, so no request may fail of which the client has had nothing.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo_lite.runtime.tasks import running
from tests.chaos.arena import Say
from tests.chaos.load import Load, pause, telling
from tests.chaos.questions import Known, Question, questions
from tests.chaos.report import Report
from tests.chaos.stock_engines import StockCluster
from tests.chaos.storm import rage
from tests.vllm.stock import Role, StockEngine, forwarded

#: Of the prefill engines: how long they keep blocks that no decode engine reads.
_LEASE_S = 20.0
_REST_S = _LEASE_S + 40.0
_BACK_S = 300.0
_MOMENT_S = 10.0
_DOWN_S = 4.0
_PAUSE_S = (0.5, 4.0)
_MAX_TOKENS = 160
#: Health checks under way.
_SPARE_FILES = 8
#: The Forwarder keeps a connection for some seconds after its last request, one for each request
#: that ran at the same time and engine.
_KEPT_S = 20.0


@dataclass(frozen=True)
class Kill:
    """moment: of `StockCluster.when`. core: only vLLM's engine process. all: every engine of the
    role."""

    name: str
    role: Role
    moment: str
    core: bool = False
    all: bool = False


KILLS = (
    Kill("prefill: when a leg begins", "prefill", "begins"),
    Kill("prefill: while a leg runs", "prefill", "runs"),
    Kill("prefill: when a leg has ended", "prefill", "ends"),
    Kill("prefill: its engine process", "prefill", "runs", core=True),
    Kill("prefill: all engines", "prefill", "runs", all=True),
    Kill("decode: before the first byte", "decode", "begins"),
    Kill("decode: while legs run", "decode", "runs"),
    Kill("decode: its engine process", "decode", "runs", core=True),
)


def greedy_questions() -> list[Question]:
    """vLLM's CPU build crashes on seeded prompts that it computes in chunks. Answers are so short
    that one engine, on cores that others use, gives them within a client's patience."""
    return [
        replace(one, body=one.body | {"max_tokens": min(one.body["max_tokens"], _MAX_TOKENS)})
        for one in questions()
        if "seed" not in one.body
    ]


class ForwardStorm:
    """Kills engines until `stop`, of each role in the order of `KILLS`, again and again; what is
    down then comes back first.

    counts: how often each kill was done. trouble: engines that have not come back.
    """

    def __init__(self, cluster: StockCluster, *, seed: int, say: Say):
        self.counts: Counter[str] = Counter({kill.name: 0 for kill in KILLS})
        self.trouble: list[str] = []
        self._cluster, self._say = cluster, say
        self._rng = random.Random(seed)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        self._stop.set()

    async def rage(self) -> None:
        async with asyncio.TaskGroup() as lanes:
            for role in ("prefill", "decode"):
                lanes.create_task(self._lane(role), name=f"lane {role}")

    async def strike(self, kill: Kill) -> None:
        """One kill, if its moment comes, until the engine is used again."""
        cluster = self._cluster
        able = cluster.running.prefill if kill.role == "prefill" else cluster.running.decode
        first = self._rng.choice(able)
        if not await cluster.when(first, kill.moment, _MOMENT_S):
            return self._say(f"{kill.name}: no such moment")
        struck = able if kill.all else [first]
        for engine in struck:
            engine.kill_core() if kill.core else engine.kill()
        if kill.role == "decode":
            # What is under way there may also end a moment later, with the server.
            cluster.kills.append(time.monotonic() + (_DOWN_S if kill.core else 0.0))
        self.counts[kill.name] += 1
        self._say(f"killed {kill.name} ({', '.join(engine.url[7:] for engine in struck)})")
        await pause(self._stop, self._rng.uniform(0, _DOWN_S))
        # All at once: a machine with few cores starts two engines in the time of one.
        await asyncio.gather(*map(self._again, struck))

    async def _again(self, engine: StockEngine) -> None:
        await asyncio.to_thread(engine.end)
        engine.start()  # from this thread: the kernel's death signal comes with the end of a thread
        try:
            await self._cluster.back(engine, _BACK_S)
        except TimeoutError as exc:
            self.trouble.append(str(exc))

    async def _lane(self, role: Role) -> None:
        for kill in itertools.cycle(kill for kill in KILLS if kill.role == role):
            await pause(self._stop, self._rng.uniform(*_PAUSE_S))
            if self._stop.is_set() or self.trouble:
                return
            await self.strike(kill)


async def under_load(
    cluster: StockCluster,
    known: Known,
    body: Callable[[ForwardStorm], Awaitable[None]],
    *,
    what: str,
    seed: int,
    clients: int,
    say: Say,
    rest_s: float = _REST_S,
) -> Report:
    """`body` under load, between two rests."""
    report = Report(what=what, seed=seed, refusals_allowed=False, of_a_graph=False)
    storm = ForwardStorm(cluster, seed=seed, say=say)
    load = Load(
        *(cluster.port, *known), seed=seed, clients=clients, cancels=0.25, excuse=cluster.excuse
    )
    report.tally, began = load.tally, time.monotonic()
    report.trouble += [f"before: {why}"] if (why := await cluster.at_rest(rest_s)) else []
    counted, files = await cluster.counters(), cluster.open_files()
    async with running(telling(load.tally, say), name="news"), load:
        await body(storm)
    say("the load has ended; waiting until all blocks are free")
    ended = time.monotonic()
    if why := await cluster.at_rest(rest_s):
        report.trouble.append(f"afterwards: {why}")
    report.facts["all blocks free after"] = f"{time.monotonic() - ended:.1f} s"
    counts = await cluster.counters() - counted
    report.facts |= {name: str(n) for name, n in sorted(counts.items())}
    now = await cluster.open_files_at_rest(files, _KEPT_S)
    report.facts["open files of the Forwarder"] = f"{files} → {now}"
    if now > files + _SPARE_FILES:
        report.trouble.append(f"the Forwarder has {now} open files, and had {files}")
    report.blows, report.trouble = dict(storm.counts), storm.trouble + report.trouble
    report.seconds = time.monotonic() - began
    return report


async def forward_storm(
    directory: Path, known: Known, *, minutes: float, seed: int, clients: int, say: Say,
    stop: asyncio.Event,
) -> Report:  # fmt: skip
    """Two prefill and two decode engines for a while, or until `stop` is set."""
    say("starting two prefill engines, two decode engines and a Forwarder")
    with forwarded(directory / "engines", prefill=2, decode=2, lease_s=_LEASE_S) as started:
        async with StockCluster(started) as cluster:
            for engine in cluster.engines:
                await cluster.back(engine, _BACK_S)

            async def body(storm: ForwardStorm) -> None:
                await rage(storm, minutes, stop, say)

            what = f"a Forwarder for {minutes:g} minutes"
            return await under_load(
                cluster, known, body, what=what, seed=seed, clients=clients, say=say
            )

"""Mixed blows, planned by a seed: one lane for each part that can be hit.

Lanes strike at the same time, so that failures meet; within a lane the next
blow comes when the one before has healed. Only what a graph survives without a
lost request is done: a decode worker is hit while another one is ready.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.runtime.tasks import running
from tests.chaos.arena import Arena
from tests.chaos.blows import (
    ETCD,
    NATS,
    Blow,
    Blows,
    NotNow,
    freezing,
    holding,
    killing,
    restarting,
)
from tests.chaos.cluster import DECODE, FRONTEND, PREFILL, ROUTER, Cluster
from tests.chaos.load import Load, pause
from tests.chaos.report import Report

_RETRY_S = 0.5


@dataclass(frozen=True)
class Kind:
    """per_20_min: how often it is done in twenty minutes where the machine keeps up."""

    name: str
    blow: Blow
    per_20_min: float


@dataclass(frozen=True)
class Lane:
    """pause_s: between two blows: shortest, longest."""

    name: str
    pause_s: tuple[float, float]
    kinds: tuple[Kind, ...]


#: Leases of configs/chaos.yaml live for the default time; a worker that is stopped for
#: longer than that becomes a zombie.
LANES = (
    Lane(
        "decode",
        (0.5, 3.0),
        (
            Kind("kill decode worker", killing(DECODE, spare=1, again=0.75), 33),
            Kind("kill decode engine", killing(DECODE, engine=True, spare=1, again=0.75), 33),
            Kind("stop decode briefly", holding(DECODE, 0.2, 2.0), 8),
            Kind("stop decode past health", holding(DECODE, 11, 14, spare=1), 3),
            Kind("stop decode past lease", holding(DECODE, 34, 36, spare=1), 1),
        ),
    ),
    Lane(
        "prefill",
        (0.5, 3.0),
        (
            Kind("kill prefill worker", killing(PREFILL, again=0.75), 33),
            Kind("kill prefill engine", killing(PREFILL, engine=True, again=0.75), 33),
            Kind("stop prefill briefly", holding(PREFILL, 0.2, 2.0), 8),
            Kind("stop prefill past health", holding(PREFILL, 4, 8), 4),
            Kind("stop prefill past lease", holding(PREFILL, 34, 36), 1),
        ),
    ),
    Lane(
        "frontend",
        (10.0, 30.0),
        (
            Kind("kill Frontend", killing(FRONTEND, again=0.4), 33),
            Kind("stop Frontend briefly", holding(FRONTEND, 0.2, 3.0), 5),
        ),
    ),
    Lane(
        "router",
        (5.0, 15.0),
        (
            Kind("kill Router", killing(ROUTER, again=0.4), 33),
            Kind("stop Router briefly", holding(ROUTER, 0.2, 3.0), 5),
        ),
    ),
    Lane(
        "broker",
        (5.0, 15.0),
        (
            Kind("kill nats-server", restarting(NATS, 0, 2), 33),
            Kind("kill nats-server, wiped", restarting(NATS, 0, 2, wiped=True), 33),
            Kind("freeze nats-server", freezing(NATS, 0.5, 6), 6),
        ),
    ),
    Lane(
        "store",
        (5.0, 15.0),
        (
            Kind("kill etcd", restarting(ETCD, 0, 4), 33),
            Kind("kill etcd, wiped", restarting(ETCD, 0, 4, wiped=True), 33),
            Kind("freeze etcd", freezing(ETCD, 0.5, 8), 6),
        ),
    ),
)


class Storm:
    """Strikes until `stop` is set; what is under way then heals first.

    trouble: blows after which something did not come back, and what that was.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        seed: int,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.trouble: list[str] = []
        self._lanes = {
            lane: Blows(cluster, random.Random(f"{seed}/{lane.name}"), say) for lane in LANES
        }
        self._stop = asyncio.Event()

    @property
    def counts(self) -> dict[str, int]:
        return {
            kind.name: blows.counts[kind.name]
            for lane, blows in self._lanes.items()
            for kind in lane.kinds
        }

    def stop(self) -> None:
        self._stop.set()
        for blows in self._lanes.values():
            blows.ending = True

    async def rage(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for lane, blows in self._lanes.items():
                tasks.create_task(self._strike(lane, blows), name=f"lane {lane.name}")

    async def _strike(self, lane: Lane, blows: Blows) -> None:
        await pause(self._stop, blows.rng.uniform(0, lane.pause_s[1]))
        while not self._stop.is_set():
            kind = _due(lane, blows)
            pause_s = blows.rng.uniform(*lane.pause_s)
            try:
                await kind.blow(blows, kind.name)
            except NotNow:
                pause_s = _RETRY_S
            except (TimeoutError, AssertionError, DynamoLiteError, ProcessLookupError) as exc:
                self.trouble.append(f"{kind.name}: {type(exc).__name__}: {exc}"[:2000])
                blows.say(f"trouble: {self.trouble[-1]}")
            await pause(self._stop, pause_s)


def _due(lane: Lane, blows: Blows) -> Kind:
    """The kind that is furthest behind its share; which of them first, chance decides."""

    def behind(kind: Kind) -> float:
        return (blows.counts[kind.name] + blows.rng.random()) / kind.per_20_min

    return min(lane.kinds, key=behind)


async def storm(
    stage: Arena, minutes: float, seed: int, clients: int, stop: asyncio.Event
) -> Report:
    """Mixed chaos for a while, or until `stop` is set."""
    report = Report(what=f"chaos for {minutes:g} minutes", seed=seed)
    plan = Storm(stage.cluster, seed=seed, say=stage.say)

    async def body(_: Load) -> None:
        async with running(plan.rage(), name="storm") as raging:
            await pause(stop, 60 * minutes)
            stage.say("nothing new is broken; waiting for what still is")
            plan.stop()
            await raging

    await stage.run(report, body, clients=clients)
    report.blows, report.trouble = plan.counts, plan.trouble + report.trouble
    return report

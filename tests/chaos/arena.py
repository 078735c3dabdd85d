"""A cluster under load: brought to rest, let go, brought to rest again, reported."""

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo_lite.runtime.tasks import running
from tests.chaos.client import Answer
from tests.chaos.cluster import DECODE, FRONTEND, PREFILL, Cluster
from tests.chaos.load import Load, telling
from tests.chaos.meters import Meters
from tests.chaos.questions import Known, Question
from tests.chaos.report import Report
from tests.chaos.standing import at_rest
from tests.vllm.graph import descendants_of

_EXIT = re.compile(r"(\w+)-\w+ +(?:\| )?ended \(((?:exit|signal) -?\d+)\)")
_END_S = 2.0

Say = Callable[[str], None]


@dataclass
class Arena:
    """free_blocks: of a decode engine at rest."""

    cluster: Cluster
    meters: Meters
    asked: list[Question]
    right: dict[str, Answer]
    free_blocks: int
    say: Say

    async def run(
        self,
        report: Report,
        body: Callable[[Load], Awaitable[None]],
        *,
        clients: int = 8,
        cancels: float = 0.15,
    ) -> None:
        """`body` under load, between two rests; everything seen goes into `report`."""
        cluster, began = self.cluster, time.monotonic()
        _, trouble = await at_rest(cluster, self.free_blocks)
        report.trouble += [f"before: {trouble}"] if trouble else []
        await self.meters.ask()
        exits, counted = self._exits(), self.meters.totals()
        load = Load(
            *(cluster.port, self.asked, self.right),
            seed=report.seed,
            clients=clients,
            cancels=cancels,
            excuse=cluster.excuse,
        )
        report.tally = load.tally
        try:
            async with running(telling(load.tally, self.say, self._news), name="news"):
                async with load:
                    await body(load)
                self.say("the load has ended; waiting for rest")
                _, trouble = await at_rest(cluster, self.free_blocks)
                report.trouble += [f"afterwards: {trouble}"] if trouble else []
        finally:
            await self.meters.ask()
            report.meter(self.meters.totals() - counted)
            report.exits = dict(self._exits() - exits)
            report.seconds = time.monotonic() - began

    def _exits(self) -> Counter[str]:
        """How processes ended that their supervisors started again."""
        said = self.cluster.graph.output
        return Counter(f"{service} {how}" for service, how in _EXIT.findall(said))

    def _news(self) -> str:
        up = ", ".join(f"{s} {len(self.cluster.ready(s))}" for s in (FRONTEND, DECODE, PREFILL))
        return f"; moved {self.meters.total('requests_moved')}; ready: {up}"


@asynccontextmanager
async def open_arena(
    directory: Path, known: Known, say: Say, options: Sequence[str] = ()
) -> AsyncIterator[Arena]:
    say("starting the graph")
    async with (
        Cluster(directory, options) as cluster,
        Meters(lambda: [member.state for member in cluster.members()]) as meters,
    ):
        found, trouble = await at_rest(cluster)
        if trouble:
            raise AssertionError(f"the graph does not come to rest: {trouble}")
        free = max(found.values())
        names = ", ".join(member.name for member in cluster.members())
        say(f"ready: {names}; {free} blocks are free in each engine")
        yield Arena(cluster, meters, *known, free, say)
        say("stopping the graph")
    if cluster.unclean:
        raise AssertionError("; ".join(cluster.unclean))


def children() -> set[int]:
    """The processes below this one."""
    return set(descendants_of(os.getpid()))


async def left(had: set[int]) -> list[str]:
    """The processes that are there besides `had`. Those that are just ending are waited for."""
    deadline = time.monotonic() + _END_S
    while (more := children() - had) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return [f"process {pid} is left" for pid in sorted(more)]

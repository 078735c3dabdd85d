"""The short version of scripts/chaos: some mixed blows, and cheap scenarios.

One graph of two decode workers, one prefill worker and a Router lives through all of it.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.arena import Arena, children, left, open_arena
from tests.chaos.cancels import REACHED_S, leave_often, reach_times
from tests.chaos.outages import OUTAGES
from tests.chaos.questions import answers, questions
from tests.chaos.report import Report
from tests.chaos.scenario import Scenario, Scene, play
from tests.chaos.storm import storm
from tests.vllm.graph import PlainServer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

SEED = 3
MINUTES = 0.3
CANCELS = 100
MEASURED = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena(
    stage, reference: PlainServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Arena]:
    stage.clear()
    asked = questions()[::3]
    known = asked, await answers(reference.url, asked)
    had = children()
    directory = tmp_path_factory.mktemp("chaos")
    async with open_arena(
        directory, known, print, ["--PrefillWorker.ServiceArgs.workers=1"]
    ) as running:
        yield running
    assert not await left(had)


def passed(report: Report) -> Report:
    print(report.as_text())
    assert not report.failures, report.as_text()
    return report


@pytest.mark.parametrize("name", ["router-killed", "nats-killed"])
async def test_a_router_or_broker_that_dies_costs_no_request(arena: Arena, name: str):
    scenario = next(s for s in OUTAGES if s.name == name)
    passed(await play(arena, scenario, SEED))


async def test_clients_that_leave_cost_no_block_and_the_writer_knows_soon(arena: Arena):
    async def body(scene: Scene) -> None:
        await leave_often(scene, CANCELS)
        delays = await reach_times(scene, MEASURED)
        assert len(delays) == MEASURED and max(delays) < REACHED_S, delays

    report = passed(await play(arena, Scenario("cancels", "", body, clients=2), SEED))
    assert report.remote_prefills["cancelled"] > CANCELS / 10
    assert report.tally.cancelled >= CANCELS


async def test_mixed_chaos(arena: Arena):
    report = passed(await storm(arena, MINUTES, SEED, 4, asyncio.Event()))
    assert report.tally.right > 10
    assert sum(report.blows.values()) > 5, report.blows

"""The short version of `scripts/chaos --forwarder`: one kill of each important kind."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.arena import Belongings
from tests.chaos.forward_storm import (
    KILLS,
    ForwardStorm,
    greedy_questions,
    stock_cluster,
    under_load,
)
from tests.chaos.questions import answers
from tests.vllm.graph import PlainServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LEASE_S = 6.0
STEADY_S = 3.0
PREFILL = "prefill: when a leg has ended"
DECODE = "decode: while legs run"


async def test_engines_that_are_killed_cost_no_answer_that_had_not_begun(
    stage, reference: PlainServer, tmp_path: Path
):
    stage.clear()
    asked = greedy_questions()[::3]
    known = asked, await answers(reference.url, asked)
    had = Belongings.now()
    kills = {kill.name: kill for kill in KILLS}

    async def body(storm: ForwardStorm) -> None:
        await asyncio.sleep(STEADY_S)
        # Both at once: a machine with few cores starts two engines in the time of one.
        await asyncio.gather(storm.strike(kills[PREFILL]), storm.strike(kills[DECODE]))
        await asyncio.sleep(STEADY_S)

    async with stock_cluster(tmp_path, prefill=1, decode=2, lease_s=LEASE_S) as cluster:
        report = await under_load(
            cluster, known, body, what="test", seed=3, clients=3, say=print, rest_s=LEASE_S + 20
        )
    print(report.as_text())
    assert not report.failures, report.as_text()
    assert (report.blows[PREFILL], report.blows[DECODE]) == (1, 1)
    assert int(report.facts["answers disaggregated"]) > 0
    assert not await had.left()

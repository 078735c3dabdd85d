"""The short version of `scripts/chaos --forwarder`: one kill of each important kind."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.arena import children, left
from tests.chaos.forward_storm import KILLS, ForwardStorm, greedy_questions, under_load
from tests.chaos.questions import answers
from tests.chaos.stock_engines import StockCluster
from tests.vllm.graph import PlainServer, descendants_of
from tests.vllm.stock import CONNECTORS, PAIR_LEASE_S, StockEngine, StockPair, forwarding

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

BACK_S = 300.0
STEADY_S = 3.0
PREFILL = "prefill: when a leg has ended"
DECODE = "decode: while legs run"


async def test_engines_that_are_killed_cost_no_answer_that_had_not_begun(
    stock: StockPair, reference: PlainServer, tmp_path: Path
):
    """A second decode engine joins the shared ones."""
    asked = greedy_questions()[::3]
    known = asked, await answers(reference.url, asked)
    _ = stock.prefill.url, stock.decode.url  # both are ready
    had = children(_families(stock))
    kills = {kill.name: kill for kill in KILLS}

    async def body(storm: ForwardStorm) -> None:
        await asyncio.sleep(STEADY_S)
        # Both at once: a machine with few cores starts two engines in the time of one.
        await asyncio.gather(storm.strike(kills[PREFILL]), storm.strike(kills[DECODE]))
        await asyncio.sleep(STEADY_S)

    connector = CONNECTORS["nixl"]
    second = StockEngine(tmp_path / "decode", "decode", connector, lease_s=PAIR_LEASE_S)
    with second, forwarding(tmp_path / "forwarder", [stock.prefill], [stock.decode, second]) as f:
        async with StockCluster(f) as cluster:
            for engine in cluster.engines:
                await cluster.back(engine, BACK_S)
            rest_s = PAIR_LEASE_S + 20
            report = await under_load(
                cluster, known, body, what="test", seed=3, clients=3, say=print, rest_s=rest_s
            )
    print(report.as_text())
    assert not report.failures, report.as_text()
    assert (report.blows[PREFILL], report.blows[DECODE]) == (1, 1)
    assert int(report.facts["answers disaggregated"]) > 0
    assert not await left(had, _families(stock))


def _families(stock: StockPair) -> list[int]:
    """Of the engines, which may be other processes in the end."""
    pids = (stock.prefill.pid, stock.decode.pid)
    return [one for pid in pids for one in (pid, *descendants_of(pid))]

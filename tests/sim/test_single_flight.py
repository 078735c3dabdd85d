"""Siblings in a simulated engine: one prefill, one transfer, right tokens for all."""

import asyncio

import pytest

from tests.sim.pair import GREEDY, Pair, play, tokens
from tests.simulation.engine.model import first_wrong
from tests.simulation.engine.mover import Wire

PROMPT = tokens(1, 100)
NAMES = ("r1", "r2", "r3", "r4")


def same(pair: Pair) -> bool:
    return all(first_wrong(PROMPT, GREEDY, pair.got[name]) is None for name in pair.ended)


def test_four_siblings_are_prefilled_and_transferred_once():
    async def script(pair: Pair) -> None:
        for name in NAMES:
            await pair.submit(name, PROMPT, GREEDY)
        await pair.until(lambda: len(pair.ended) == 4)
        assert same(pair)
        decided = {n: v for n, v in pair.counts.items() if n.startswith("decision/")}
        assert decided == {"decision/remote/long": 1, "decision/local/single_flight": 3}
        assert pair.counts["remote/committed"] == 1
        assert pair.counts["single_flight/hit"] == 3
        await pair.idle()

    play(script)


@pytest.mark.parametrize("after_s", [0.005, 0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("gone", [["r1"], ["r2", "r3"], ["r1", "r2"]], ids="/".join)
def test_aborts_leave_the_others_whole(after_s: float, gone: list[str]):
    async def script(pair: Pair) -> None:
        for name in NAMES:
            await pair.submit(name, PROMPT, GREEDY)
        await asyncio.sleep(after_s)
        await pair.decode.abort(gone)
        await pair.until(lambda: not {*NAMES} - {*gone} - {*pair.ended})
        assert same(pair)
        await pair.idle()

    play(script, wire=Wire(slowest_s=0.3), num_blocks=96)


def test_when_no_write_succeeds_the_prompt_is_computed_once_for_all():
    async def script(pair: Pair) -> None:
        pair.claims_hold = False
        for name in NAMES:
            await pair.submit(name, PROMPT, GREEDY)
        await pair.until(lambda: len(pair.ended) == 4)
        assert same(pair)
        # The leader goes first, and what it computes in the first step is in the cache.
        assert pair.counts["remote/writer_abandoned"] <= 3
        await pair.idle()

    play(script, num_blocks=160)

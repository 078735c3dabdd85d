"""Aborts in a simulated pair of engines: every block comes back, and no cache has KV that is not
what its tokens say."""

import asyncio

import pytest

from tests.sim.pair import GREEDY, Pair, play, tokens
from tests.simulation.engine.model import first_wrong
from tests.simulation.engine.mover import Wire


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_an_abort_while_a_prefix_is_read_leaves_no_foreign_kv(after_s: float):
    async def script(pair: Pair) -> None:
        shared = tokens(1, 60)
        await pair.submit("one", shared, GREEDY)
        await pair.until(lambda: "one" in pair.ended)
        pair.engines["prefill"].core.pool.forget()
        await pair.submit("two", shared + tokens(2, 40), GREEDY)
        await asyncio.sleep(after_s)
        await pair.decode.abort(["two"])
        asked = {f"r{n}": tokens(10 + n, 90) for n in range(4)}
        for name, prompt in asked.items():
            await pair.submit(name, prompt, GREEDY)
        await pair.until(lambda: asked.keys() <= pair.ended.keys())
        asked["again"] = shared + tokens(2, 40)
        await pair.submit("again", asked["again"], GREEDY)
        await pair.until(lambda: "again" in pair.ended)
        for name, prompt in asked.items():
            assert first_wrong(prompt, GREEDY, pair.got[name]) is None
        await pair.idle()
        for engine in pair.engines.values():
            for block, key in engine.core.pool.cached():
                assert engine.core.memory.ends_with(block, key)

    play(script, wire=Wire(slowest_s=0.3), num_blocks=60)

"""The simulated engines by themselves: a decode and a prefill engine over the memory twins."""

import asyncio

import pytest

from tests.sim.pair import GREEDY, Pair, play, tokens
from tests.simulation.engine.model import (
    first_wrong,
)
from tests.simulation.engine.mover import Landing, Wire


def test_long_prompts_are_prefilled_remotely_and_the_tokens_are_right():
    async def script(pair: Pair) -> None:
        shared, asked = tokens(0, 20), {}
        for number in range(10):
            asked[f"r{number}"] = shared[: 4 * (number % 4)] + tokens(number, 3 + 6 * number)
            await pair.submit(f"r{number}", asked[f"r{number}"], GREEDY)
        await pair.until(lambda: len(pair.ended) == 10)
        for name, prompt in asked.items():
            assert len(pair.got[name]) == 8
            assert first_wrong(prompt, GREEDY, pair.got[name]) is None
        assert pair.counts["remote/committed"] >= 5
        assert pair.counts["decision/local/short"] >= 1
        await pair.until(lambda: not pair.jobs.working)
        pair.check_idle()

    play(script, num_blocks=160)


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.3, 1.0])
def test_an_abort_at_any_moment_gives_every_block_back(after_s: float):
    async def script(pair: Pair) -> None:
        await pair.submit("r", tokens(1, 100), GREEDY)
        await asyncio.sleep(after_s)
        await pair.decode.abort(["r"])
        await pair.submit("next", tokens(1, 60) + tokens(2, 40), GREEDY)
        await pair.until(lambda: "next" in pair.ended)
        assert first_wrong(tokens(1, 60) + tokens(2, 40), GREEDY, pair.got["next"]) is None
        await pair.until(lambda: not any(e.core.scheduler.has_work for e in pair.engines.values()))
        pair.check_idle()

    play(script, wire=Wire(slowest_s=0.3), num_blocks=60)


def test_a_closed_fence_writes_nothing_and_the_prompt_is_prefilled_locally():
    landings: list[Landing] = []

    async def script(pair: Pair) -> None:
        pair.fabric.on_landing = landings.append
        pair.alive = False
        await pair.submit("r", tokens(1, 40), GREEDY)
        await pair.until(lambda: "r" in pair.ended)
        assert first_wrong(tokens(1, 40), GREEDY, pair.got["r"]) is None
        assert pair.counts["fenced_writes"] == 1
        assert pair.counts["remote/writer_failed"] == 1
        assert landings == []

    play(script)


def test_a_write_that_fails_breaks_the_link_and_the_prompt_is_prefilled_locally():
    async def script(pair: Pair) -> None:
        assert pair.decode.metadata is not None
        pair.fabric.joined = lambda here, there: False
        await pair.submit("r", tokens(1, 40), GREEDY)
        await pair.until(lambda: "r" in pair.ended)
        assert first_wrong(tokens(1, 40), GREEDY, pair.got["r"]) is None
        [(engine_id, why)] = pair.broken
        assert engine_id == pair.decode.metadata.engine_id
        assert "the peer does not answer" in why
        assert pair.counts["remote/writer_failed"] == 1

    play(script)


def test_what_was_generated_elsewhere_is_gone_on_with():
    async def script(pair: Pair) -> None:
        prompt = tokens(1, 10)
        await pair.submit("whole", prompt, GREEDY)
        await pair.until(lambda: "whole" in pair.ended)
        whole = pair.got["whole"]
        await pair.submit("rest", prompt, GREEDY, output_token_ids=whole[:5])
        await pair.submit("nothing", prompt, GREEDY, output_token_ids=whole)
        await pair.until(lambda: len(pair.ended) == 3)
        assert pair.got["rest"] == whole[5:]
        assert pair.got["nothing"] == []

    play(script)


def test_a_prefix_that_only_the_decode_engine_has_is_read():
    async def script(pair: Pair) -> None:
        first = tokens(1, 60)
        await pair.submit("one", first, GREEDY)
        await pair.until(lambda: "one" in pair.ended)
        # Decoded there, and so unknown to the prefill engine.
        second = first + pair.got["one"] + tokens(2, 40)
        await pair.submit("two", second, GREEDY)
        await pair.until(lambda: "two" in pair.ended)
        assert first_wrong(second, GREEDY, pair.got["two"]) is None
        assert pair.counts["prefix_read/read"] == 1
        # From another prefill engine's point of view: it has nothing of it.
        pair.engines["prefill"].core.pool.forget()
        third = second + pair.got["two"] + tokens(3, 30)
        await pair.submit("three", third, GREEDY)
        await pair.until(lambda: "three" in pair.ended)
        assert first_wrong(third, GREEDY, pair.got["three"]) is None
        assert pair.counts["prefix_read/read"] == 2
        await pair.until(lambda: not pair.jobs.working)
        pair.check_idle()

    play(script, num_blocks=160)


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
        others = {f"r{n}": tokens(10 + n, 90) for n in range(4)}
        for name, prompt in others.items():
            await pair.submit(name, prompt, GREEDY)
        await pair.until(lambda: others.keys() <= pair.ended.keys())
        await pair.submit("again", shared + tokens(2, 40), GREEDY)
        await pair.until(lambda: "again" in pair.ended)
        for name, prompt in [*others.items(), ("again", shared + tokens(2, 40))]:
            assert first_wrong(prompt, GREEDY, pair.got[name]) is None
        await pair.until(lambda: not any(e.core.scheduler.has_work for e in pair.engines.values()))
        pair.check_idle()
        for engine in pair.engines.values():
            for block, key in engine.core.pool.cached():
                assert engine.core.memory.ends_with(block, key)

    play(script, wire=Wire(slowest_s=0.3), num_blocks=60)

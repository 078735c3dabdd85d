"""A wire that is slower than the computing, between simulated engines."""

from dynamo_lite.disagg.counters import COMPUTED, DESCRIPTORS, ENDED
from tests.sim.pair import GREEDY, Pair, play, tokens
from tests.simulation.engine.mover import Wire

JOBS, CONCURRENCY, PROMPT = 6, 2, 61
SLOW = Wire(fastest_s=0.9, slowest_s=1.0)


def test_a_slow_wire_holds_the_computing_back_to_the_jobs_that_are_held():
    """The pair's prefill worker holds two jobs: one computes while the other one's writes end."""

    async def script(pair: Pair) -> None:
        for number in range(JOBS):
            await pair.submit(f"r{number}", tokens(number, PROMPT), GREEDY)

        def computed() -> int:
            return pair.counts.get(COMPUTED, 0)

        def bounded() -> bool:
            over = len(pair.counts.get(ENDED, ()))
            assert len(pair.jobs.working) <= CONCURRENCY
            assert computed() <= (over + CONCURRENCY) * PROMPT
            return over == JOBS

        await pair.until(lambda: bounded() or computed() == CONCURRENCY * PROMPT)
        assert not pair.counts.get(ENDED), "the second job is computed before the first is written"
        await pair.until(bounded)
        await pair.until(lambda: len(pair.ended) == JOBS)
        assert [end[1] for end in pair.counts[ENDED]] == ["written"] * JOBS
        assert pair.counts[DESCRIPTORS] >= JOBS
        await pair.idle()

    play(script, wire=SLOW, num_blocks=160)

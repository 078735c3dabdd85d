"""The two sides of a decode engine's scheduler half, without an engine or a network.

The engine is a block pool that counts references; what goes to the bridge is run
by the test, over the queue's and the messaging's in-process twins.
"""

import pytest

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.prefill import ClaimRefused
from tests.builders import CLAIM, ENGINE, ManualClock, engine_metadata
from tests.unit.decode_engine import (
    DEPTH,
    HELD,
    POOL,
    QUEUE_SIZE,
    TIMEOUT_S,
    TTL_S,
    WRITER,
    Decode,
    prompt,
)

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


# Decisions


@pytest.mark.parametrize(
    ("tokens", "cached", "first", "end"),
    [
        (10, 0, 0, 3),
        (8, 0, 0, 2),
        (9, 0, 0, 2),  # the last token is alone in its block: that one is not asked for
        (17, 8, 2, 4),
        (13, 4, 1, 3),
        (15, 8, 2, 4),
    ],
)
async def test_a_job_names_the_blocks_of_the_tokens_that_are_wanted(
    decode: Decode, tokens: int, cached: int, first: int, end: int
):
    request = prompt("r1", tokens, priority=3, cache_salt="salt")
    assert decode.admit(request, cached) == tokens - 1 - cached
    step = decode.half.build_step()
    job = await decode.job()
    assert step.expect == {job.attempt: "r1"}
    assert step.poll
    assert job.prompt_token_ids == request.prompt_token_ids[:-1]
    assert job.num_computed_tokens == cached
    taken = [block.block_id for block in decode.taken["r1"]]
    assert job.block_ids == taken[first:end]
    assert job.prefix_block_ids == taken[:first]
    assert (job.engine_id, job.request_id) == (ENGINE, "r1")
    assert (job.priority, job.cache_salt) == (3, "salt")
    assert job.deadline == decode.clock.wall() + TIMEOUT_S
    assert decode.counted("decision/remote/long") == 1
    assert decode.half.build_step().expect == {}


async def test_what_another_connector_can_load_counts_as_cached(decode: Decode):
    request, look = prompt("r1", 20), decode.half.num_new_matched_tokens
    assert look(request, 8, offloaded=8) == (0, False), "the rest is short"
    assert look(request, 8, offloaded=7) == (11, True), "and then nothing of it is used"
    assert decode.admit(prompt("r2", 4)) == 0
    assert decode.half.cached_tokens("r2") is None, "the engine knows it"
    decode.output("r2")  # loaded by the other one


@pytest.mark.parametrize("steps", [1, 2])
async def test_a_job_waits_for_the_step_that_reads_its_blocks(clock: ManualClock, steps: int):
    decode = Decode(clock, overlapping_steps=steps)
    async with decode.queue:
        decode.admit(prompt("r1", 10))
        assert decode.half.build_step(in_use=True).expect
        decode.admit(prompt("r2", 10))
        await decode.network()
        published: list[int] = []
        for _ in range(2 * steps - 1):
            decode.half.build_step()
            await decode.network()
            published.append((await decode.queue.depth()).jobs)
        # Also those of the next step, while the one that reads is in flight.
        assert published == ([2] if steps == 1 else [0, 1, 2])


async def test_a_prefix_that_a_step_under_way_still_computes_is_not_offered(clock: ManualClock):
    decode, offered = Decode(clock, overlapping_steps=2), []
    async with decode.queue:
        # The prompts have blocks 0 to 4, 5 to 9, and so on.
        for name, filling in (("r1", [2, 7]), ("r2", []), ("r3", []), ("r4", [])):
            decode.admit(prompt(name, 17), 12)
            decode.pool.blocks[10].is_null = name == "r3"
            decode.half.build_step(filling)
            offered.append((await decode.job()).prefix_block_ids)
        await decode.network()
    assert offered == [[], [], [], [15, 16, 17]]


async def test_nothing_is_written_before_the_window_of_a_model_that_forgets(decode: Decode):
    """Null blocks stand for tokens that no layer looks at any more; they are everybody's."""
    for block in decode.pool.blocks[:3]:
        block.is_null = True
    assert decode.admit(prompt("r1", 22), 4) == 17
    job = await decode.job_of_step()
    assert (job.num_computed_tokens, job.block_ids) == (12, [3, 4, 5])
    assert job.prefix_block_ids == []


async def test_blocks_that_a_writer_may_read_are_held_as_well(decode: Decode):
    decode.admit(prompt("r1", 17), 12)
    attempt = (job := await decode.job_of_step()).attempt
    assert await decode.claim(attempt) == HELD
    decode.finish("r1")
    await decode.step()
    held = {block.block_id for block in decode.half.prefills._by_attempt[attempt].held}
    assert held == {*job.prefix_block_ids, *job.block_ids} and len(job.prefix_block_ids) == 3
    await decode.done(attempt, "abandoned")
    decode.half.build_step()
    decode.assert_clean()


async def test_a_verdict_without_blocks_is_taken_again(decode: Decode):
    """vLLM had no room: it asks again later, and nothing was begun or counted."""
    request = prompt("r1", 10)
    assert decode.half.num_new_matched_tokens(request, 0) == (9, True)
    decode.sees(jobs=QUEUE_SIZE)
    assert decode.admit(request) == 0
    assert decode.counted("decision/remote/long") == 0
    assert decode.counted("decision/local/queue_full") == 1
    assert decode.bridge.calls == []


# How remote prefills end


async def test_received_kv_commits_the_prefill(decode: Decode):
    attempt = await decode.ask("r1", claimed=True)
    assert decode.half.build_step().claims == {attempt: CLAIM}
    await decode.done(attempt)
    decode.output("r1")
    assert decode.counted("remote/committed") == 1
    decode.half.state_after_alloc(prompt("r1", 10), [], 0)
    stages = {name for name in decode.half.stats.data if name.startswith("stage/")}
    assert stages == {f"stage/{stage}" for stage in ("decide", "queue", "fill", "resume")}
    assert decode.half.build_step().give_up == []
    await decode.step()
    assert not decode.half.busy
    decode.finish_last("r1")
    await decode.done(attempt)
    await decode.step()
    decode.assert_clean()


@pytest.mark.parametrize("how", ["its word", "its claim runs out"])
async def test_a_claimed_job_keeps_its_blocks_until_its_writer_cannot_write(
    decode: Decode, how: str
):
    attempt = await decode.ask("r1", claimed=True)
    assert [block.ref_cnt for block in decode.taken["r1"]] == [2, 2, 2]
    decode.pass_s(TIMEOUT_S)
    assert decode.half.build_step().give_up == [(attempt, "r1")]
    assert await decode.claim(attempt) == ClaimRefused(reason="withdrawn")
    decode.output(failed=["r1"])
    decode.finish("r1")
    assert decode.pool.used == 3
    assert decode.half.busy
    assert decode.half.build_step().poll
    if how == "its word":
        await decode.done(attempt, "abandoned")
    else:
        decode.pass_s(HELD.for_s + TTL_S - TIMEOUT_S - 0.1)
        decode.half.build_step()
        assert decode.pool.used == 3
        decode.pass_s(0.2)
    assert decode.half.busy
    assert decode.pool.used == 3
    assert decode.half.build_step().poll, "what has arrived is taken before the blocks' reuse"
    assert decode.pool.used == 0
    assert not decode.half.build_step().poll
    decode.assert_clean()


@pytest.mark.parametrize("trouble", ["full", "away", "no writer"])
async def test_a_job_that_is_not_queued_is_computed_here(decode: Decode, trouble: str):
    if trouble == "full":
        for i in range(DEPTH):
            await decode.queue.push(b"", message_id=str(i))
    decode.broker.set_connected(trouble != "away")
    assert decode.admit(prompt("r1", 10)) > 0
    [attempt] = decode.half.build_step().expect
    decode.writers.members = () if trouble == "no writer" else (WRITER,)
    await decode.network()
    assert decode.half.build_step().give_up == [(attempt, "r1")]
    assert decode.counted("remote/refused") == 1
    decode.finish_last("r1")


# Writers and this engine come and go


async def test_a_writer_that_cannot_work_is_refused_but_a_silent_one_shows_life(decode: Decode):
    decode.writers.members = (WRITER, 0xB)
    attempt = await decode.ask("r1")
    decode.writers.ails = {WRITER: "the engine is stuck"}
    refused = await decode.claim(attempt)
    assert refused == ClaimRefused(reason="not able to work: the engine is stuck")
    assert await decode.claim(attempt, 0xB) == HELD
    assert decode.writers.alive == [WRITER, 0xB]


async def test_a_claim_of_an_unknown_writer_is_refused(decode: Decode):
    """Its end would be noticed late."""
    attempt = await decode.ask("r1")
    refused = ClaimRefused(reason="not able to work: it is not registered")
    assert await decode.claim(attempt, 0xBAD) == refused
    assert decode.counted("dropped/claim") == 1
    assert await decode.claim(attempt) == HELD


async def test_the_word_of_another_claim_is_dropped(decode: Decode):
    attempt = await decode.ask("r1", claimed=True)
    with pytest.raises(ProtocolError, match="is held under another claim"):
        await decode.done(attempt, "abandoned", claim=CLAIM + 1)
    refused = ClaimRefused(reason="claimed by another writer")
    assert await decode.claim(attempt, claim=CLAIM + 1) == refused
    assert decode.counted("dropped/claim") == 1
    assert decode.half.build_step().give_up == []
    await decode.done(attempt, "abandoned")
    assert decode.half.build_step().give_up == [(attempt, "r1")]


async def test_an_engine_describes_itself(decode: Decode):
    assert await decode.describe() is None
    decode.half.metadata = engine_metadata(num_blocks=POOL)
    await decode.ask("r1", claimed=True)
    await decode.ask("r2", claimed=True)
    decode.finish("r2")
    await decode.step()
    decode.sees(jobs=2, tokens=30)
    status = await decode.describe()
    assert status is not None
    assert (status.free_blocks, status.total_blocks) == (POOL - 6, POOL)
    assert (status.waiting, status.waiting_tokens, status.quarantined) == (1, 9, 1)
    assert (status.queue_jobs, status.queue_tokens) == (2, 30)
    assert (status.last_step_age_s, status.unresponsive_writers) == (0.0, 0)
    decode.clock.now += 2.0
    assert (await decode.describe()).last_step_age_s == 2.0
    decode.clock.now += 60.0
    status = await decode.describe()
    assert status is not None and status.queue_jobs is status.queue_tokens is None

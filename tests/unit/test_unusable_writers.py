"""Prefill workers that live but do not write into this decode engine; in virtual time.

A prompt that only they could prefill stays local: it is not queued, and waits for no worker.
"""

import asyncio

import pytest

from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.decisions import Decision, decode_explained
from dynamo_lite.protocol.records import LinkRecord
from tests.builders import ENGINE, NAMESPACE
from tests.unit.decode_engine import WRITER, prompt
from tests.unit.decode_session import OTHER, Scene
from tests.unit.virtual import virtual


async def marks(scene: Scene, writer: int) -> None:
    """The prefill worker does not use its link to this engine."""
    link = LinkRecord(prefill_lease_id=writer, engine_id=ENGINE, decode_lease_id=1, detail="no way")
    await scene.store.put(names.link_key(NAMESPACE, writer, ENGINE), encode_json(link))


async def seen() -> None:
    """The bridge has looked at the queue again."""
    await asyncio.sleep(0.5)


async def last_decision(scene: Scene) -> Decision:
    reply = await scene.explain(last=1)
    return decode_explained(reply).decisions[0]


@virtual
async def test_with_unusable_workers_only_a_prompt_is_local_at_once():
    scene = Scene()
    await marks(scene, WRITER)
    async with scene.open(WRITER):
        assert scene.decode.admit(prompt("r1", 10)) == 0
        assert scene.decode.counted("decision/local/no_prefill_worker") == 1
        assert (await scene.decode.queue.depth()).jobs == 0
        decision = await last_decision(scene)
        assert decision.queue is not None
        assert (decision.queue.prefill_workers, decision.queue.prefill_workers_alive) == (0, 1)
        workers = scene.decode.net.workers
        assert (len(workers.usable), workers.unusable, workers.unresponsive) == (0, 1, 0)


@virtual
async def test_what_is_queued_is_given_up_with_the_last_usable_worker():
    async with Scene().open(WRITER, OTHER) as scene:
        await marks(scene, WRITER)
        held, queued = await scene.ask("r1", claimed_by=OTHER), await scene.ask("r2")
        await marks(scene, OTHER)
        await scene.given_up_within(0.1, queued)
        assert scene.counted("no_writer") == 1
        assert (await scene.decode.queue.depth()).jobs == 1, "only the claimed one is left"
        assert held not in scene.given_up, "its writer may have begun before"
        with pytest.MonkeyPatch.context() as just_before:
            just_before.setattr(PrefillWorkers, "usable", PrefillWorkers.responsive)
            assert scene.decode.admit(prompt("r3", 10)) > 0
        pushed = scene.decode.attempt_of("r3")
        await scene.given_up_within(0.1, pushed)
        scene.decode.output("r1")
        assert scene.counted("committed") == 1


@virtual
async def test_a_job_that_an_unusable_worker_pulled_is_a_try_of_the_prompt():
    """The queue does not deliver it again: the worker gives it back without a claim, and the
    prefill is requested again."""
    async with Scene().open(WRITER, OTHER) as scene:
        scene.decode.tune(max_remote_prefills=3)
        await marks(scene, OTHER)

        async def gives_back(request_id: str) -> None:
            attempt = await scene.ask(request_id)
            await scene.decode.done(attempt, "failed", claim=0)
            await scene.given_up_within(0.1, attempt)
            scene.decode.output(failed=[request_id])
            scene.decode.pool.free_blocks(scene.decode.taken.pop(request_id))

        for number in range(2):
            await gives_back("r1")
            assert scene.counted("writer_failed") == number + 1
        await scene.ask("r1", claimed_by=WRITER)
        scene.decode.output("r1")
        assert scene.counted("committed") == 1
        assert scene.decode.counted("resume/writer_lost") == 2
        for _ in range(3):
            await gives_back("r2")
        assert scene.decode.admit(prompt("r2", 10)) == 0
        assert scene.decode.counted("resume/tried") == 1


@virtual
async def test_a_write_that_failed_is_a_try_of_the_prompt():
    """Also where the mark of the link is known before the writer's word."""
    async with Scene().open(WRITER, OTHER) as scene:
        attempt = await scene.ask("r1", claimed_by=WRITER)
        await marks(scene, WRITER)
        await seen()
        await scene.decode.done(attempt, "failed")
        await scene.given_up_within(0.1, attempt)
        scene.decode.output(failed=["r1"])
        assert scene.counted("writer_failed") == 1
        assert scene.decode.half.prefills.by_request["r1"].tries == 1
        assert scene.decode.counted("resume/writer_lost") == 1, "the other worker may do it"


@virtual
async def test_without_a_usable_worker_a_job_that_came_back_is_computed_here():
    async with Scene().open(WRITER) as scene:
        attempt = await scene.ask("r1")
        # Its record and its word race; here the word is first.
        await scene.decode.done(attempt, "failed", claim=0)
        await scene.given_up_within(0.1, attempt)
        await marks(scene, WRITER)
        await asyncio.sleep(0.01)
        scene.decode.output(failed=["r1"])
        assert scene.decode.counted("resume/no_other") == 1

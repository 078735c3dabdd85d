"""Prefill workers that live but do not write into this decode engine; in virtual time.

A prompt that only they could prefill stays local: it is not queued, and waits for no worker.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from prometheus_client import CollectorRegistry

from dynamo_lite.cli.decision_view import as_text
from dynamo_lite.disagg.prefill.peer_links import PeerLinks
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.decisions import Decision, decode_explained
from dynamo_lite.protocol.records import EngineMetadata, LinkRecord, RankMetadata, encode_engine
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.process.stop import StopRequest
from dynamo_lite.transfer.directory import MetadataDirectory
from dynamo_lite.vllm.engine.fingerprint import check_peer
from tests.builders import ENGINE, NAMESPACE, process_spec
from tests.unit.decode_engine import WRITER, prompt
from tests.unit.decode_session import OTHER, Scene
from tests.unit.virtual import virtual
from tests.vllm.without_engines.test_fingerprint import engine


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
        assert (await scene.decode.queue.depth()).total == 0
        decision = await last_decision(scene)
        assert decision.queue is not None
        assert (decision.queue.prefill_workers, decision.queue.prefill_workers_alive) == (0, 1)
        text = as_text(1.0, 1, decision)
        assert "0 of 1 live prefill worker usable" in text and "ps --links" in text
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
        assert (await scene.decode.queue.depth()).total == 1, "only the claimed one is left"
        assert held not in scene.given_up, "its writer may have begun before"
        scene.decode.sees()  # a decision that was made just before
        pushed = await scene.ask("r3")
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
            await scene.decode.done(attempt, "failed", writer=OTHER, claim=0)
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
        await scene.decode.done(attempt, "failed", writer=WRITER)
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
        await scene.decode.done(attempt, "failed", writer=WRITER, claim=0)
        await scene.given_up_within(0.1, attempt)
        await marks(scene, WRITER)
        await asyncio.sleep(0.01)
        scene.decode.output(failed=["r1"])
        assert scene.decode.counted("resume/no_other") == 1


class PrefillEngine:
    def __init__(self, own: EngineMetadata):
        self._own = own

    def check_peer(self, target: EngineMetadata) -> None:
        check_peer(self._own, target)


@contextlib.asynccontextmanager
async def linked(scene: Scene, own: EngineMetadata, target: EngineMetadata) -> AsyncIterator[None]:
    """The shipped links of a prefill worker, over the scene's store and messaging."""
    target = msgspec.structs.replace(target, engine_id=ENGINE)
    async with scene.store.lease(10.0) as lease:
        await scene.store.put(names.nixl_metadata_key(NAMESPACE, ENGINE), encode_engine(target))
        host = Host(
            process_spec("PrefillWorker"),
            store=scene.store,
            messaging=scene.decode.messaging,
            lease=lease,
            registry=CollectorRegistry(),
            report=lambda line: None,
            stop=StopRequest(),
        )
        directory = MetadataDirectory(scene.store, NAMESPACE)
        links = PeerLinks(host, PrefillEngine(own), directory)
        host.spawn(links.run(), "links")
        try:
            async with asyncio.timeout(5):
                await links.listed.wait()
            await scene.join(lease.id)
            yield
        finally:
            await host.cancel_tasks()


def with_draft_layers(target: EngineMetadata) -> EngineMetadata:
    """A decode engine that also keeps KV for a draft model (EAGLE, MTP): one more layer."""

    def drafting(rank: RankMetadata) -> RankMetadata:
        last = rank.regions[-1]
        draft = msgspec.structs.replace(last, layer="draft", base=last.base + (1 << 30))
        return msgspec.structs.replace(rank, regions=(*rank.regions, draft))

    return msgspec.structs.replace(target, ranks=tuple(map(drafting, target.ranks)))


@virtual
async def test_speculative_decoding_on_the_decode_side_alone_queues_nothing():
    scene = Scene()
    async with scene.open(), linked(scene, engine("p"), with_draft_layers(engine("d"))):
        await seen()
        assert scene.decode.admit(prompt("r1", 10)) == 0
        assert scene.decode.counted("decision/local/no_prefill_worker") == 1
        assert scene.decode.net.workers.unusable == 1
        [record] = (await scene.store.get_prefix(names.links_prefix(NAMESPACE))).values()
        assert "draft" in decode_json(record, LinkRecord).detail


@virtual
async def test_engines_with_the_same_layers_are_linked_and_asked():
    scene = Scene()
    async with scene.open(), linked(scene, engine("p"), engine("d")):
        await seen()
        await scene.ask("r1")

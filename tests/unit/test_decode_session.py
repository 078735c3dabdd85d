"""A decode engine's network side as a whole, over the in-process twins; in virtual time."""

import asyncio
from typing import Any

import pytest

from dynamo_lite.disagg.attempts.ledger import DeleteJob, Outcome
from dynamo_lite.disagg.decode import prefill_workers
from dynamo_lite.disagg.queue.base import QueueDepth
from dynamo_lite.disagg.transfer_params import decode_params
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_json
from dynamo_lite.protocol.decisions import Decision, decode_explained
from dynamo_lite.protocol.errors import BrokerUnavailable
from dynamo_lite.protocol.health import Leave
from dynamo_lite.protocol.live_options import LiveOptionsRecord
from dynamo_lite.protocol.prefill import Done
from dynamo_lite.protocol.records import LinkRecord
from tests.builders import CLAIM, ENGINE, NAMESPACE, engine_metadata, loop_time
from tests.unit.decode_engine import HELD, LIMIT, WRITER, prompt
from tests.unit.decode_session import OTHER, Scene
from tests.unit.virtual import virtual


@virtual
async def test_no_request_waits_for_a_writer_that_falls_silent():
    async with Scene().open(WRITER, OTHER) as scene:
        held = await scene.ask("r1", claimed_by=WRITER)
        others = await scene.ask("r3", claimed_by=OTHER)
        queued = await scene.ask("r2")
        await scene.hush(WRITER)
        assert 1.5 < await scene.given_up_within(3.1, held), "until its claim runs out"
        assert scene.counted("writer_lost") == 1
        assert set(scene.given_up) == {held}
        await scene.hush(OTHER)
        await scene.given_up_within(5.0, queued, others)
        assert scene.counted("writer_lost") == 2 and scene.counted("no_writer") == 1
        assert scene.workers.responsive == ()
        await asyncio.sleep(0.5)
        assert scene.decode.admit(prompt("r4", 10)) == 0


@virtual
async def test_a_writer_whose_engine_is_stuck_is_believed_and_refused():
    async with Scene().open(WRITER) as scene:
        held, queued = await scene.ask("r1", claimed_by=WRITER), await scene.ask("r2")
        scene.verdicts[WRITER] = False, "stuck"
        await scene.given_up_within(1.1, held, queued)
        assert scene.counted("writer_silent") == scene.counted("no_writer") == 1
        scene.verdicts[WRITER] = True, ""
        await asyncio.sleep(2.0)
        attempt = await scene.ask("r3")
        scene.verdicts[WRITER] = False, "stuck"
        await scene.given_up_within(1.1, attempt)


@virtual
async def test_a_silent_writer_that_claims_is_given_another_while():
    """It has shown life; and when nothing follows, its claim runs out."""
    async with Scene().open(WRITER, OTHER) as scene:
        await scene.hush(WRITER)
        await asyncio.sleep(6.0)
        assert len(scene.workers.responsive) == 1
        held = await scene.ask("r1", claimed_by=WRITER)
        assert len(scene.workers.responsive) == 2
        assert 2.8 < await scene.given_up_within(3.1, held)
        assert scene.counted("writer_lost") == 1


@virtual
async def test_a_killed_writer_is_known_from_one_that_leaves():
    """The keys of both are gone; the one that leaves renews its claims at once."""
    async with Scene().open(WRITER, OTHER) as scene:
        leaving = await scene.ask("r1", claimed_by=WRITER)
        killed = await scene.ask("r2", claimed_by=OTHER)
        await scene.hush(OTHER)
        await scene.leave(WRITER)
        await scene.leave(OTHER)
        await asyncio.sleep(0.01)
        assert await scene.decode.claim(leaving, WRITER) == HELD
        assert 0.4 < await scene.given_up_within(2.0, killed) < 0.6
        await asyncio.sleep(10.0)
        assert set(scene.given_up) == {killed}
        assert scene.counted("writer_lost") == 1


@virtual
async def test_what_was_queued_is_taken_back_when_the_broker_has_lost_the_queue():
    async with Scene().open(WRITER) as scene:
        scene.decode.tune(max_queue_wait_s=2.0)
        held, queued = await scene.ask("r1", claimed_by=WRITER), await scene.ask("r2")
        scene.decode.broker.lose()
        await scene.given_up_within(2.1, queued)
        assert scene.counted("taken_back") == 1
        assert set(scene.given_up) == {queued}
        scene.decode.output("r1")
        assert scene.counted("committed") == 1
        assert held not in scene.given_up
        later = await scene.ask("r3", claimed_by=WRITER)
        await asyncio.sleep(1.0)
        assert later not in scene.given_up


@virtual
async def test_an_engine_leaves_at_its_message_and_not_for_lost_keys():
    async with Scene().open(WRITER) as scene:
        queued = await scene.ask("r1")
        await scene.store.delete(names.nixl_metadata_key(NAMESPACE, ENGINE))
        await asyncio.sleep(1.0)
        assert not scene.given_up
        leave = names.leave_subject(NAMESPACE, ENGINE)
        await scene.decode.messaging.request(leave, encode(Leave(lease_id=1)), timeout_s=1.0)
        await scene.given_up_within(0.1, queued)
        assert scene.counted("leaving") == 1
        assert scene.decode.admit(prompt("r2", 10)) == 0


@virtual
async def test_live_options_reach_the_next_decision_and_a_question_says_so():
    async with Scene().open(WRITER) as scene:
        key = names.live_options_key(NAMESPACE, "VllmWorker")
        await scene.ask("r1")
        changed = LiveOptionsRecord(values={"max-local-prefill-length": 20})
        await scene.store.put(key, encode_json(changed))
        await asyncio.sleep(0.01)
        assert scene.decode.admit(prompt("r2", 10)) == 0
        await scene.store.put(key, b"nonsense")
        await asyncio.sleep(0.01)
        assert scene.decode.admit(prompt("r3", 10)) == 0
        assert scene.decode.counted("dropped/config") == 1
        await scene.store.delete(key)
        await asyncio.sleep(0.01)
        await scene.ask("r4")
        reply = await scene.explain()
        told = decode_explained(reply).decisions
        assert [(d.verdict, d.thresholds.max_local_prefill_length) for d in told] == [
            ("remote", LIMIT),
            ("local", 20),
            ("local", 20),
            ("remote", LIMIT),
        ]


@virtual
async def test_what_finds_no_room_is_counted():
    """Otherwise prompts that are computed here under overload would hide it."""
    async with Scene().open(WRITER) as scene:
        scene.decode.tune(max_prefill_queue_tokens=100)
        await scene.ask("r1")
        scene.decode.sees(jobs=2, tokens=109)
        assert scene.decode.admit(prompt("r2", 10)) == 0
        assert scene.decode.admit(prompt("r3", 2)) == 0, "too short in any case"
        assert scene.decode.counted("decision/local/queue_tokens") == 1
        assert scene.decode.counted("overflow_tokens") == 10
        assert scene.decode.counted("asked_tokens") == 9
        scene.decode.tune(queue_view_max_age_s=0.001)
        await asyncio.sleep(0.01)
        assert scene.decode.admit(prompt("r4", 10)) == 0
        assert scene.decode.counted("decision/local/queue_unknown") == 1
        assert scene.decode.counted("overflow_tokens") == 20, "an outage is no lack of demand"


async def others_have(scene: Scene, *, jobs: int, tokens: int) -> None:
    """The broker counts these on the queue."""

    async def depth() -> QueueDepth:
        return QueueDepth(jobs, 4 * tokens)

    scene.decode.queue.depth = depth
    await asyncio.sleep(0.3)


@virtual
async def test_what_others_have_on_the_queue_counts_and_what_was_asked_since():
    async with Scene().open(WRITER) as scene:
        scene.decode.tune(max_prefill_queue_tokens=100)
        scene.decode.sees(jobs=1, tokens=100)
        assert scene.decode.admit(prompt("r1", 10)) == 0
        assert scene.decode.counted("decision/local/queue_tokens") == 1
        await others_have(scene, jobs=1, tokens=91)
        assert scene.decode.admit(prompt("r2", 10)) > 0
        assert scene.decode.admit(prompt("r3", 10)) == 0
        reply = await scene.explain(last=1)
        seen = decode_explained(reply).decisions[0].queue
        assert seen is not None and (seen.jobs, seen.tokens) == (2, 100)
        # What this engine waits for is certain, whatever the broker counts.
        await others_have(scene, jobs=0, tokens=0)
        assert scene.decode.admit(prompt("r4", 10)) > 0
        reply = await scene.explain(last=1)
        seen = decode_explained(reply).decisions[0].queue
        assert seen is not None and (seen.jobs, seen.tokens) == (1, 9)


@virtual
async def test_a_remote_prefill_ends_with_its_requests_time():
    async with Scene().open(WRITER) as scene:
        soon = prompt("r1", 10, kv_transfer_params=decode_params(2.0, loop_time()))
        assert scene.decode.admit(soon) > 0
        attempt = scene.decode.attempt_of("r1")
        assert 1.9 < await scene.given_up_within(2.5, attempt) < 2.2
        assert scene.decode.counted("remote/deadline") == 1
        late = prompt("r2", 10, kv_transfer_params=decode_params(0.0, loop_time()))
        assert scene.decode.admit(late) == 0
        assert scene.decode.counted("decision/local/too_late") == 1
        assert scene.decode.counted("overflow_tokens") == 0, "more room would not help it"


class Broken(Exception):
    """Stands for a fault in the code of a loop."""


def broken(*_: Any, **__: Any) -> Any:
    raise Broken


@pytest.mark.parametrize("loop", ["queue-view", "links", "roster", "options"])
@virtual
async def test_a_session_ends_with_the_failure_of_a_loop_that_it_needs(
    loop: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    scene = Scene()
    net = scene.decode.net
    monkeypatch.setattr(net, "_on_options", broken)
    with pytest.raises(Broken):
        async with scene.open(WRITER):
            match loop:
                case "queue-view":
                    monkeypatch.setattr(scene.decode.queue, "depth", broken)
                case "links":
                    monkeypatch.setattr(prefill_workers, "changes", broken)
                    await scene.store.put(names.links_prefix(NAMESPACE) + "x", b"")
                case "roster":
                    monkeypatch.setattr(net.workers.roster, "_publish", broken)
                    await scene.join(OTHER)
                case _:
                    key = names.live_options_key(NAMESPACE, "VllmWorker")
                    record = b'{"values":{"max-prefill-queue-size":1},"version":1}'
                    await scene.store.put(key, record)
            await asyncio.sleep(60)  # virtual, and cut short
    assert any(record.getMessage().endswith(" failed") for record in caplog.records)


@pytest.mark.parametrize("event", ["writer_done", "writer_left", "published", "tick"])
@virtual
async def test_a_failure_of_the_ledger_names_its_event_and_ends_the_session(
    event: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Instructions may be lost, for which a request would wait for ever."""
    scene = Scene()
    with pytest.raises(Broken):
        async with scene.open(WRITER):
            monkeypatch.setattr(scene.decode.ledger, event, broken)
            if event == "writer_left":
                await scene.leave(WRITER)
                await asyncio.sleep(60)
            assert scene.decode.admit(prompt("r1", 10)) > 0
            attempt = scene.decode.attempt_of("r1")
            if event == "writer_done":
                await asyncio.sleep(0.1)
                assert await scene.decode.claim(attempt, WRITER) == HELD
                done = Done(attempt=attempt, claim=CLAIM, outcome="failed")
                subject = names.done_subject(NAMESPACE, ENGINE)
                await scene.decode.messaging.publish(subject, encode(done))
            await asyncio.sleep(60)  # virtual, and cut short
    assert "the ledger failed at an event" in caplog.text and f"ledger.{event}(" in caplog.text


@virtual
async def test_an_instruction_that_fails_does_not_stop_the_next_one():
    async with Scene().open(WRITER) as scene:
        deleted: list[int] = []

        async def delete(sequence: int) -> bool:
            deleted.append(sequence)
            if sequence == 1:
                raise BrokerUnavailable("away")
            return True

        scene.decode.queue.delete = delete  # type: ignore[method-assign]
        scene.decode.ledger.withdraw_queued = lambda _: [DeleteJob(1), DeleteJob(2)]
        scene.decode.attempts.apply(lambda ledger: ledger.withdraw_queued(Outcome.LEAVING))
        await asyncio.sleep(0.1)
        assert deleted == [1, 2]


# Prefill workers that live but do not write into this engine


async def marks(scene: Scene, writer: int) -> None:
    """The prefill worker does not use its link to this engine."""
    link = LinkRecord(prefill_lease_id=writer, engine_id=ENGINE, decode_lease_id=1, detail="no way")
    await scene.store.put(names.link_key(NAMESPACE, writer, ENGINE), encode_json(link))


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
        scene.decode.half.metadata = engine_metadata()
        status = await scene.decode.describe()
        assert status is not None
        assert (status.unusable_writers, status.unresponsive_writers) == (1, 0)
        assert scene.workers.usable == ()


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
            just_before.setattr(scene.workers, "usable", scene.workers.responsive)
            assert scene.decode.admit(prompt("r3", 10)) > 0
        pushed = scene.decode.attempt_of("r3")
        await scene.given_up_within(0.1, pushed)
        scene.decode.output("r1")
        assert scene.counted("committed") == 1

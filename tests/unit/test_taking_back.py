"""A decode engine takes queued remote prefills back: races, and what is counted."""

import pytest

from dynamo_lite.disagg.queue.base import QueueDepth
from dynamo_lite.protocol.prefill import ClaimRefused
from tests.builders import ManualClock
from tests.unit.decode_engine import Decode, prompt
from tests.unit.test_decisions import taken
from tests.unit.test_single_flight import WAITS, asks, sibling

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

#: `max-queue-wait-s`, and a little more.
LIMIT_S, LONG_S = 2.0, 2.1


@pytest.fixture(autouse=True)
def impatient(decode: Decode) -> None:
    decode.tune(max_queue_wait_s=LIMIT_S)


async def depth(decode: Decode) -> QueueDepth:
    return await decode.queue.depth()


async def test_what_no_worker_claims_is_computed_here_and_is_off_the_queue(
    decode: Decode, clock: ManualClock
):
    attempt = await decode.ask("r1", 100)
    decode.pass_s(LIMIT_S - 0.01)
    assert decode.half.build_step().give_up == []
    decode.pass_s(0.11)
    assert decode.half.build_step().give_up == [(attempt, "r1")]
    assert decode.counted("remote/taken_back") == 1
    await decode.network()
    assert (await depth(decode)).jobs == 0
    assert decode.half.prefills.jobs == decode.half.prefills.tokens == 0
    decode.output(failed=["r1"])
    clock.now += 100.0
    # Never again, whatever the queue looks like.
    decode.sees()
    assert asks(decode, prompt("r1", 100), 0) == (0, False)
    decode.half.build_step()
    clock.now += 0.2
    decode.half.build_step()
    [asked] = taken(decode)
    text = asked.as_text()
    assert "outcome: taken_back" in text and "lost: 2.1" in text
    assert "detail: no claim for 2.10 s" in text
    decode.finish_last("r1")


async def test_the_limit_may_change_and_holds_for_what_is_asked_after_it(
    decode: Decode, clock: ManualClock
):
    before = await decode.ask("r1", 10)
    decode.tune(max_queue_wait_s=8.0)
    after = await decode.ask("r2", 10)
    decode.pass_s(LONG_S)
    assert decode.half.build_step().give_up == [(before, "r1")]
    decode.pass_s(8.0)
    assert decode.half.build_step().give_up == [(after, "r2")]


async def test_a_job_that_cannot_be_deleted_is_refused_when_it_is_delivered(decode: Decode):
    """The broker is out of reach, and the queue keeps the job."""
    attempt = await decode.ask("r1", 100)
    decode.pass_s(LONG_S)
    decode.broker.set_connected(False)
    assert decode.half.build_step().give_up == [(attempt, "r1")]
    await decode.network()
    decode.output(failed=["r1"])
    decode.broker.set_connected(True)
    assert (await depth(decode)).jobs == 1
    job = await decode.queue.pull(timeout_s=0)
    assert job is not None and isinstance(await decode.claim(attempt), ClaimRefused)
    await job.ack()
    assert (await depth(decode)).jobs == 0
    decode.finish_last("r1")


async def test_a_job_whose_push_is_confirmed_late_is_deleted(decode: Decode):
    assert decode.admit(prompt("r1", 100)) > 0
    decode.half.build_step()
    await decode.bridge.submitted.pop(0)  # the push begins
    decode.pass_s(LONG_S)
    [(attempt, _)] = decode.half.build_step().give_up
    assert (await depth(decode)).jobs == 0
    await decode.network()
    assert (await depth(decode)).jobs == 0
    assert decode.broker.stream("s", decode.queue_config).last_sequence == 1, "it was pushed"
    decode.output(failed=["r1"])
    assert decode.counted("remote/taken_back") == 1 and decode.counted("remote/refused") == 0
    assert isinstance(await decode.claim(attempt), ClaimRefused)
    decode.finish_last("r1")


@pytest.mark.parametrize(
    "cancelled", ["before its time", "before the engine knows", "before the ranks know", "later"]
)
async def test_a_request_may_end_at_any_time(decode: Decode, clock: ManualClock, cancelled: str):
    """Cancelled by its client, or moved to another worker."""
    attempt = await decode.ask("r1", 100)
    if cancelled == "before its time":
        clock.now += LONG_S
        decode.finish("r1")
        assert (await decode.step()).give_up == [(attempt, "r1")]
        assert decode.counted("remote/cancelled") == 1
    elif cancelled == "before the engine knows":
        decode.pass_s(LONG_S)
        decode.finish("r1")
        assert decode.half.build_step().give_up == [(attempt, "r1")]
        assert decode.counted("remote/taken_back") == 1
    else:
        decode.pass_s(LONG_S)
        assert decode.half.build_step().give_up == [(attempt, "r1")]
        if cancelled == "before the ranks know":
            decode.finish("r1")
            decode.output(failed=["r1"])
        else:
            decode.output(failed=["r1"])
            assert asks(decode, prompt("r1", 100)) == (0, False)
            decode.half.build_step()
            decode.finish("r1")
        assert decode.counted("remote/taken_back") == 1
    assert decode.counted("remote/taken_back") + decode.counted("remote/cancelled") == 1
    await decode.network()
    assert (await depth(decode)).jobs == 0
    decode.half.build_step()
    decode.assert_clean()


async def test_followers_of_a_leader_that_was_taken_back_are_served(decode: Decode):
    assert decode.admit(sibling("r1", 100)) > 0
    decode.half.build_step()
    await decode.network()
    followers = [sibling(name, 100) for name in ("r2", "r3")]
    assert [asks(decode, one) for one in followers] == [WAITS] * 2
    decode.pass_s(LONG_S)
    [(_, leader)] = decode.half.build_step().give_up
    assert leader == "r1"
    # Until the ranks know of it, its blocks are reserved, and they wait.
    assert [asks(decode, one) for one in followers] == [WAITS] * 2
    decode.output(failed=["r1"])
    assert asks(decode, sibling("r1", 100)) == (0, False)
    decode.half.build_step()
    assert decode.admit(followers[0], cached=96) == decode.admit(followers[1], cached=96) == 0
    assert decode.counted("single_flight/hit") == 2
    for name in ("r1", "r2", "r3"):
        decode.finish(name)
    decode.half.build_step()
    await decode.network()
    decode.assert_clean()

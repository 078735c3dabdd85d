"""A decode engine takes queued remote prefills back: races, and what is counted."""

import asyncio
import itertools
from typing import Any

import pytest

from dynamo_lite.cli import decision_view
from dynamo_lite.disagg.counters import SPAN
from dynamo_lite.policy.attempts.attempt import AttemptState
from dynamo_lite.protocol.prefill import ClaimRefused, Granted
from dynamo_lite.protocol.trace import new_trace
from dynamo_lite.queue.base import QueueDepth
from tests.builders import ManualClock
from tests.unit.decode_engine import WRITER, Decode, prompt
from tests.unit.decode_session import OtherEngine, Scene
from tests.unit.test_decisions import taken
from tests.unit.test_decode_scheduler import clock as clock
from tests.unit.test_decode_scheduler import decode as decode
from tests.unit.test_single_flight import WAITS, asks, sibling
from tests.unit.virtual import virtual

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

#: More than any wait that was expected.
LONG_S = 3.0


async def knows_its_costs(decode: Decode) -> None:
    """A prompt of 100 tokens takes 0.1 s here, and a remote one was claimed at once."""
    # Coins follow from the attempts' ids.
    decode.new_attempt = map("a{}".format, itertools.count()).__next__
    decode.tune(max_local_prefill_length=1000)
    assert decode.admit(prompt("here", 100)) == 0
    decode.half.build_step(scheduled={"here": 100})
    decode.clock.now += 0.1
    decode.half.build_step()
    decode.tune()
    attempt = await decode.ask("there", 100, claimed=True)
    job = await decode.queue.pull(timeout_s=0)
    assert job is not None
    await job.ack()
    decode.clock.now += 0.1
    await decode.done(attempt)
    decode.output("there")
    decode.half.state_after_alloc(prompt("there", 100), [], 0)
    for request_id in ("here", "there"):
        decode.finish(request_id)
    await decode.network()
    decode.sees()


def looks(decode: Decode, times: int = 12, **scheduled: int) -> list[tuple[str, str]]:
    """The engine looks a few times. Returns what it gave up: attempts and requests."""
    given_up: list[tuple[str, str]] = []
    for _ in range(times):
        decode.clock.now += 0.2
        decode.net.queue_watch.workers_changed()
        decode.sees()
        given_up += decode.half.build_step(scheduled=scheduled).give_up
        if given_up:
            break
    return given_up


def looked(decode: Decode) -> dict[str, float]:
    data = decode.half.stats.data
    return {k.removeprefix("steal_look/"): n for k, n in data.items() if k.startswith("steal_look")}


async def depth(decode: Decode) -> QueueDepth:
    return await decode.queue.depth()


async def test_what_nobody_claims_is_computed_here_and_is_off_the_queue(
    decode: Decode, clock: ManualClock
):
    await knows_its_costs(decode)
    attempt = await decode.ask("r1", 100)
    assert looks(decode, 3) == [] and looked(decode) == {"remote_cheaper": 3}
    clock.now += LONG_S
    assert looks(decode) == [(attempt, "r1")]
    assert decode.counted("remote/taken_back") == decode.counted("steal_look/overdue") == 1
    await decode.network()
    assert (await depth(decode)).total == 0
    totals, _ = decode.half.prefills.backlog()
    assert totals.jobs == totals.tokens == 0
    decode.output(failed=["r1"])
    clock.now += 100.0
    # Never again, whatever the queue looks like.
    assert asks(decode, prompt("r1", 100), 0) == (0, False)
    decode.half.build_step(scheduled={"r1": 100})
    clock.now += 0.2
    decode.half.build_step()
    asked = taken(decode)[-1]
    _, _, decision = asked
    assert decision.asked is not None and decision.computed_s == pytest.approx(100.2)
    text = decision_view.as_text(*asked)
    assert "taken_back after 3." in text and "; then computed here in 100.20 s" in text
    assert "  because  overdue, about " in text and "s here" in text
    decode.finish("r1")
    decode.assert_clean()


async def test_a_long_queue_is_noticed_and_a_worker_that_leaves(decode: Decode, clock: ManualClock):
    """The place in the queue counts: what comes later does not delay an earlier job."""
    await knows_its_costs(decode)
    others = [await decode.ask(f"o{i}", 300, claimed=not i) for i in range(3)]
    last = await decode.ask("r1", 100)
    # They are in the short lane, which does not wait for claimed jobs.
    [first, *_] = decode.half.prefills.queued()
    newest = decode.half.prefills.queued()[-1]
    ahead_s = decode.net.backlog.ahead_s
    assert (first.attempt, newest.attempt) == (others[1], last)
    assert (ahead_s(first), ahead_s(newest)) == pytest.approx((0.0, 0.6), rel=0.02)
    decode.writers.members = ()
    assert ahead_s(newest) is None
    decode.writers.members = (WRITER,)
    assert looks(decode) == [(last, "r1")]
    assert decode.counted("steal_look/queue_long") == 1


async def test_a_prompt_is_taken_back_only_while_nothing_is_computed_here(
    decode: Decode, clock: ManualClock
):
    await knows_its_costs(decode)
    attempts = [await decode.ask(name, 100) for name in ("r1", "r2")]
    clock.now += LONG_S
    [(first, request_id)] = looks(decode)
    assert first in attempts
    # It is parked until the ranks have said that they do not wait any more, then it is computed.
    assert looks(decode) == []
    decode.output(failed=[request_id])
    assert looks(decode) == []
    assert asks(decode, prompt(request_id, 100), 40) == (0, False)
    assert looks(decode, **{request_id: 4}) == []
    before = looked(decode)["prefill_here"]
    decode.half.build_step(scheduled={request_id: 12})
    decode.half.build_step()
    [(second, _)] = looks(decode)
    assert {first, second} == set(attempts) and looked(decode)["prefill_here"] == before
    assert looked(decode)["overdue"] == 2
    # A prompt without blocks waits for its turn; it goes first.
    third = await decode.ask("r3", 100)
    decode.output(failed=[name for name in ("r1", "r2") if name != request_id])
    decode.finish("r1")
    decode.finish("r2")
    asks(decode, prompt("new", 3))
    clock.now += LONG_S
    assert looks(decode) == []
    decode.half.request_finished("new")
    assert looks(decode) == [(third, "r3")]


async def test_streams_are_not_paused_for_it(decode: Decode, clock: ManualClock):
    await knows_its_costs(decode)
    await decode.ask("r1", 100)
    clock.now += LONG_S
    streams = {f"s{i}": 1 for i in range(100)}
    assert looks(decode, 5, **streams) == []
    assert looked(decode) == {"remote_cheaper": 5}
    assert looks(decode) != []


async def test_it_can_be_switched_off_while_prompts_wait(decode: Decode, clock: ManualClock):
    await knows_its_costs(decode)
    await decode.ask("r1", 100)
    decode.tune(steal_back=False)
    clock.now += LONG_S
    assert looks(decode, 30) == [] and looked(decode) == {}
    decode.tune(steal_back=True)
    assert looks(decode) != []


async def test_a_look_follows_news_and_comes_at_last_without(decode: Decode, clock: ManualClock):
    await knows_its_costs(decode)
    decode.half.build_step()
    await decode.ask("r1", 100)
    streams = {f"s{i}": 1 for i in range(200)}
    assert looked(decode) == {}

    def count(seconds: float, *, news: bool) -> float:
        before = sum(looked(decode).values())
        for _ in range(round(seconds / 0.01)):
            clock.now += 0.01
            if news:
                decode.net.queue_watch.workers_changed()
            decode.half.build_step(scheduled=streams)
        return sum(looked(decode).values()) - before

    count(0.5, news=False)
    assert count(1.0, news=False) == 1
    assert count(1.0, news=True) in (9, 10)


@virtual
async def test_readings_of_the_queue_and_notices_of_others_are_news():
    """The queue is read four times a second; another engine sends a message every 0.1 s."""
    async with Scene().open(WRITER) as scene, OtherEngine(scene).listening() as other:
        await scene.ask("r1")

        async def looks_in_two_seconds(*, notices: bool) -> float:
            before = scene.decode.counted("steal_look/unknown")
            for _ in range(20):
                if notices:
                    await other.say()
                await asyncio.sleep(0.1)
            return scene.decode.counted("steal_look/unknown") - before

        assert await looks_in_two_seconds(notices=False) in (7, 8, 9)
        assert await looks_in_two_seconds(notices=True) > 15


async def test_a_claim_that_comes_first_is_not_touched(decode: Decode, clock: ManualClock):
    await knows_its_costs(decode)
    attempt = await decode.ask("r1", 100)
    clock.now += LONG_S
    # The bridge's thread is between the grant and its report to the records.
    assert decode.ledger.claim(attempt, WRITER, clock.now) is None
    assert looks(decode) == []
    assert looked(decode)["gone"] > 0
    assert decode.ledger.state(attempt) is AttemptState.CLAIMED
    assert await decode.claim(attempt) == Granted()
    before = looked(decode)
    assert looks(decode) == [] and looked(decode) == before, "it is not looked at any more"
    decode.output("r1")
    assert decode.counted("remote/committed") == 2
    decode.finish("r1")
    await decode.done(attempt)
    await decode.network()
    decode.half.build_step()
    decode.assert_clean()


async def test_a_claim_that_comes_later_is_refused_and_its_job_is_gone(
    decode: Decode, clock: ManualClock
):
    await knows_its_costs(decode)
    attempt = await decode.ask("r1", 100)
    job = await decode.queue.pull(timeout_s=0)
    assert job is not None
    clock.now += LONG_S
    assert looks(decode) == [(attempt, "r1")]
    refused = await decode.claim(attempt)
    assert isinstance(refused, ClaimRefused) and not refused.elsewhere
    await decode.network()
    await job.ack()
    assert (await depth(decode)).total == 0
    decode.output(failed=["r1"])
    decode.finish("r1")
    decode.assert_clean()


async def test_a_job_that_cannot_be_deleted_is_refused_on_every_delivery(
    decode: Decode, clock: ManualClock
):
    """The broker is out of reach, and the queue keeps the job."""
    await knows_its_costs(decode)
    attempt = await decode.ask("r1", 100)
    clock.now += LONG_S
    decode.broker.set_connected(False)
    assert looks(decode) == [(attempt, "r1")]
    await decode.network()
    decode.output(failed=["r1"])
    decode.broker.set_connected(True)
    assert (await depth(decode)).total == 1
    for _ in range(2):
        job = await decode.queue.pull(timeout_s=0)
        assert job is not None and isinstance(await decode.claim(attempt), ClaimRefused)
        await job.nak()
    decode.finish("r1")
    decode.assert_clean()


async def test_a_job_whose_push_is_confirmed_late_is_deleted(decode: Decode, clock: ManualClock):
    await knows_its_costs(decode)
    assert decode.admit(prompt("r1", 100)) > 0
    decode.half.build_step()
    clock.now += LONG_S
    [(attempt, _)] = looks(decode)
    await decode.network()
    assert (await depth(decode)).total == 0
    decode.output(failed=["r1"])
    assert decode.counted("remote/taken_back") == 1 and decode.counted("remote/refused") == 0
    assert isinstance(await decode.claim(attempt), ClaimRefused)
    decode.finish("r1")
    decode.assert_clean()


@pytest.mark.parametrize("cancelled", ["before the look", "before the ranks know", "later"])
async def test_a_request_may_end_at_any_time(decode: Decode, clock: ManualClock, cancelled: str):
    """Cancelled by its client, or moved to another worker."""
    await knows_its_costs(decode)
    attempt = await decode.ask("r1", 100)
    clock.now += LONG_S
    if cancelled == "before the look":
        decode.finish("r1")
        assert looks(decode, 1) == [(attempt, "r1")]
        assert decode.counted("remote/cancelled") == 1
    else:
        assert looks(decode) == [(attempt, "r1")]
        if cancelled == "before the ranks know":
            decode.finish("r1")
            decode.output(failed=["r1"])
        else:
            decode.output(failed=["r1"])
            assert asks(decode, prompt("r1", 100)) == (0, False)
            decode.half.build_step(scheduled={"r1": 50})
            decode.finish("r1")
        assert decode.counted("remote/taken_back") == 1
    assert decode.counted("remote/taken_back") + decode.counted("remote/cancelled") == 1
    await decode.network()
    assert (await depth(decode)).total == 0
    decode.half.build_step()
    decode.assert_clean()


async def test_followers_of_a_leader_that_was_taken_back_are_served(
    decode: Decode, clock: ManualClock
):
    await knows_its_costs(decode)
    assert decode.admit(sibling("r1", 100)) > 0
    decode.half.build_step()
    await decode.network()
    followers = [sibling(name, 100) for name in ("r2", "r3")]
    assert [asks(decode, one) for one in followers] == [WAITS] * 2
    clock.now += LONG_S
    [(_, leader)] = looks(decode)
    assert leader == "r1"
    # Until the ranks know of it, its blocks are reserved, and they wait.
    assert [asks(decode, one) for one in followers] == [WAITS] * 2
    decode.output(failed=["r1"])
    assert asks(decode, sibling("r1", 100)) == (0, False)
    decode.half.build_step(scheduled={"r1": 100})
    assert decode.admit(followers[0], cached=96) == decode.admit(followers[1], cached=96) == 0
    assert decode.counted("single_flight/hit") == 2
    for name in ("r1", "r2", "r3"):
        decode.finish(name)
    decode.half.build_step()
    await decode.network()
    decode.assert_clean()


async def test_its_span_says_why(decode: Decode, clock: ManualClock):
    await knows_its_costs(decode)
    assert decode.admit(prompt("r1", 100, trace_headers=new_trace().headers())) > 0
    decode.half.build_step()
    await decode.network()
    clock.now += LONG_S
    assert looks(decode) != []
    spans: list[Any] = decode.half.stats.data[SPAN]
    assert "taken_back" in str(spans) and "overdue, about" in str(spans)

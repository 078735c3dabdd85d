"""A prefill worker that is slow, but works: which prompts are not sent there, which go first,
and which reach their time limit."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.direct import Direct
from tests.vllm.graph import Graph, PlainServer, reached
from tests.vllm.live import command, live_options
from tests.vllm.slow import (
    MAX_JOBS,
    SLOW_OPTIONS,
    longs,
    outcomes,
    throttled,
    until,
    works_remotely,
)
from tests.vllm.test_decisions import counting
from tests.vllm.test_prefix_read import COMPUTED

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("slow")]

MISMATCHES = "dynamo_lite_commit_mismatches_total"


@pytest.fixture(scope="module")
def roomy(stage) -> Iterator[Graph]:
    """From its first user on, more jobs may be asked for than the broker takes."""
    slow = stage.shared(SLOW_OPTIONS)
    with live_options(slow, {"VllmWorker.max-prefill-queue-size": 100}):
        yield slow


async def free_blocks(graph: Graph) -> int:
    await graph.settled()
    return (await graph.pools())[0].free_blocks


async def test_what_the_broker_refuses_is_local(roomy: Graph, reference: PlainServer):
    """All are sent to the queue, and it takes as many as it may."""
    over = 2
    requests = longs(MAX_JOBS + over, seed=1210)
    expected = await tokens_of(reference.url, requests)
    free, since = await free_blocks(roomy), counting(roomy)
    refused, committed = outcomes(roomy, "refused"), outcomes(roomy, "committed")
    with throttled(roomy.engine_pid("PrefillWorker")):
        asking = asyncio.create_task(tokens_of(roomy.url, requests, len(requests)))
        await until(roomy, lambda pool: pool.waiting == pool.queue_jobs == MAX_JOBS)
        assert not asking.done()
    assert await asking == expected
    assert since() == {"remote/long": len(requests)}
    assert outcomes(roomy, "refused") == refused + over
    assert outcomes(roomy, "committed") == committed + MAX_JOBS
    await roomy.settled(free)


async def test_short_and_urgent_prompts_pass_long_ones(roomy: Graph):
    """Two long prompts fill the worker. A short one and an urgent one pass them on the queue
    and in the engine; one that may wait is behind the long ones, though it came earlier."""
    free = await free_blocks(roomy)
    asked = {
        "first": (2300, 0),
        "second": (2300, 0),
        "may wait": (600, 5),
        "short": (600, 0),
        "urgent": (2300, -1),
    }
    async with Direct(roomy.etcd_url) as direct:
        asking: list[asyncio.Task[list[int]]] = []
        with throttled(roomy.engine_pid("PrefillWorker")):
            for number, (name, (tokens, priority)) in enumerate(asked.items(), 1):
                prompt = prompt_ids(tokens, seed=1230 + number)
                one = direct.tokens(prompt, max_tokens=1, priority=priority, name=name)
                asking.append(asyncio.create_task(one))
                await until(roomy, lambda pool, n=number: pool.waiting == n)
                if number == 2:
                    await _both_are_claimed(roomy)
            assert direct.ended == []
        await asyncio.gather(*asking)
        assert set(direct.ended[:2]) == {"short", "urgent"}
        assert direct.ended[2:] == ["first", "second", "may wait"]
    await roomy.settled(free)


async def test_what_the_worker_does_not_come_to_is_taken_back(roomy: Graph, reference: PlainServer):
    """It has claimed as many jobs as it may, and hardly computes. It is alive, so it does not
    count as lost; the engine computes the other prompts."""
    requests = longs(MAX_JOBS, seed=1250)
    expected = await tokens_of(reference.url, requests)
    await works_remotely(roomy, reference, seed=1252)
    free, since = await free_blocks(roomy), counting(roomy)
    taken, committed = outcomes(roomy, "taken_back"), outcomes(roomy, "committed")
    with live_options(roomy, {"VllmWorker.max-queue-wait-s": 2}):
        with throttled(roomy.engine_pid("PrefillWorker")):
            asking = asyncio.create_task(tokens_of(roomy.url, requests, len(requests)))
            await reached(
                lambda: outcomes(roomy, "taken_back") >= taken + 3,
                timeout_s=18,
                what="three prompts are taken back",
            )
        assert await asking == expected
    assert since() == {"remote/long": len(requests)}
    back = outcomes(roomy, "taken_back") - taken
    assert back + outcomes(roomy, "committed") - committed == len(requests)
    await roomy.settled(free)
    told = json.loads(command(roomy, "explain", "--last", "50", "--json"))
    said = [one["asked"]["detail"] for one in told if _ended(one) == "taken_back"]
    assert len(said) == back
    assert all(one.startswith("no claim for 2.") for one in said)
    assert "  outcome  taken_back after " in command(roomy, "explain", _request(told, "taken_back"))
    await works_remotely(roomy, reference, seed=1253)


def _ended(decision: dict) -> str:
    return decision["asked"]["outcome"] if decision["asked"] else ""


def _request(told: list[dict], outcome: str) -> str:
    return next(one["request_id"] for one in told if _ended(one) == outcome)


async def _both_are_claimed(graph: Graph) -> None:
    await reached(
        lambda: graph.health("PrefillWorker")["jobs"] == 2,
        timeout_s=10,
        what="both are with the worker",
    )


async def test_a_remote_prefill_beyond_its_deadline_is_made_good_here(
    slow: Graph, reference: PlainServer
):
    """The writer is alive, and computes the prompt when its time is up. It stops, and until
    then its blocks are not reused. Answers to other requests are right, too."""
    (late,), others = longs(1, seed=1240, tokens=3000), longs(3, seed=1241, tokens=300)
    expected = await tokens_of(reference.url, [late, *others])
    await works_remotely(slow, reference, seed=1242)
    free, since = await free_blocks(slow), counting(slow)
    deadline, mismatches = outcomes(slow, "deadline"), slow.count("VllmWorker", MISMATCHES)
    with live_options(slow, {"VllmWorker.remote-prefill-timeout-s": 2}):
        computed = slow.count("PrefillWorker", COMPUTED)
        with throttled(slow.engine_pid("PrefillWorker")):
            asking = asyncio.create_task(tokens_of(slow.url, [late]))
            await until(slow, lambda pool: pool.waiting == 1)
            await until(slow, lambda pool: pool.waiting == 0)
            assert outcomes(slow, "deadline") == deadline + 1
            answers = await tokens_of(slow.url, others), await asking
        assert answers == (expected[1:], expected[:1])
        await slow.settled(free)
    assert since() == {"remote/long": 1, "local/short": 3}
    written = slow.count("PrefillWorker", COMPUTED) - computed
    assert 0 < written < 3000 - 1, "it was amid the prompt"
    assert slow.count("VllmWorker", MISMATCHES) == mismatches
    await works_remotely(slow, reference, seed=1243)

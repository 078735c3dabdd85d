"""Moves, limits and deadlines at the Frontend: vLLM's app over scripted workers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.options import AdmissionOptions
from dynamo_lite.protocol.trace import new_trace
from dynamo_lite.vllm.frontend.request_trace import RequestTraces
from tests.unit.recorder import Recorder
from tests.vllm.front_half import CHAT, TEXT, Front, events, open_front

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
#: The hint is given in whole seconds.
BUSY = Refused("4 of at most 4 requests are in flight", elsewhere=True, busy=True)


#: One request of each API.
ASKED = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 5, "temperature": 0},
}


def _last_event(text: str) -> dict:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return json.loads(lines[-1].removeprefix("data: "))


@pytest.fixture
async def front(model: Path, no_leaked_tasks) -> AsyncIterator[Front]:
    async with open_front(model, leases=(1, 2)) as front:
        yield front


async def _lose_first(front: Front) -> None:
    """The worker of the first request is gone after its first token."""
    workers = front.workers
    workers.hold = True
    await asyncio.wait_for(workers.first_token.wait(), 10)
    workers.hold = False
    lease, request = workers.asked[0]
    workers.members[:] = [m for m in workers.members if m.lease_id != lease]
    workers.lose([request.request_id], "connection reset")


async def test_a_session_is_what_its_header_says(front: Front):
    for headers in ({"x-session-id": "s" * 300}, {}):
        await front.post("/v1/chat/completions", CHAT, **headers)
    sessions = [request.session for _, request in front.workers.asked]
    assert sessions == ["s" * 256, None]
    await front.idle()


async def test_each_sequence_continues_its_clients_trace(
    front: Front, monkeypatch: pytest.MonkeyPatch
):
    recorder, client = Recorder(), new_trace()
    monkeypatch.setattr(front.intake, "_traces", RequestTraces(recorder))
    two = TEXT | {"n": 2, "temperature": 1}
    headers = client.headers() | {"tracestate": "vendor=1"}
    assert (await front.post("/v1/completions", two, **headers)).status_code == 200
    await front.idle()
    spans = [span for span in recorder.spans if span.name == "generate"]
    assert [(span.context.trace_id, span.parent) for span in spans] == [
        (client.trace_id, client.span_id)
    ] * 2
    sent = [request.trace_headers for _, request in front.workers.asked]
    assert sorted(sent, key=str) == sorted((span.context.headers() for span in spans), key=str)


# Moves


@pytest.mark.parametrize("params", [{}, {"presence_penalty": 0.5}], ids=["continued", "replayed"])
async def test_a_stream_goes_on_with_another_worker(front: Front, params: dict):
    front.workers.hold = True
    asking = asyncio.create_task(front.post("/v1/chat/completions", CHAT | USAGE | params))
    await _lose_first(front)
    chunks = events((await asyncio.wait_for(asking, 10)).text)
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == "abcde"
    (prompt,) = {len(request.prompt_token_ids) for _, request in front.workers.asked}
    assert chunks[-1]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
    }
    (_, first), (_, second) = front.workers.asked
    assert second.request_id != first.request_id
    assert len(second.output_token_ids) == (0 if params else 1)
    await front.idle()


async def test_a_whole_answer_goes_on_too_and_counts_once(front: Front):
    before = await _counted(front)
    front.workers.hold = True
    asking = asyncio.create_task(front.post("/v1/completions", TEXT))
    await _lose_first(front)
    answer = (await asyncio.wait_for(asking, 10)).json()
    assert answer["choices"][0]["text"] == "abcde"
    assert answer["usage"]["completion_tokens"] == 5
    await front.idle()
    after = await _counted(front)
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 5, 1, 1, 0.5]


async def _counted(front: Front) -> list[float]:
    """vLLM's counts of prompt tokens, generated tokens, first tokens, ends, and seconds queued."""
    lines = (await front.http.get("/metrics")).text.splitlines()
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_success_total",
        "vllm:request_queue_time_seconds_sum",
    )
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))
        for name in names
    ]


# Limits


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ASKED.items())
async def test_workers_at_their_limits_are_a_429_with_their_hint(
    front: Front, path: str, body: dict, stream: bool
):
    front.workers.refusals = {1: BUSY, 2: BUSY}
    answer = await front.post(path, body | {"stream": stream})
    assert answer.status_code == 429, answer.text
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["type"] == "Too Many Requests" and "in flight" in error["message"]
    assert error.get("code", 429) == 429
    assert front.intake.refused == {"busy": 1}
    await front.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_requests_in_flight(model: Path, stream: bool):
    limits = AdmissionOptions(max_in_flight_requests=3, max_queued_tokens=10**6)
    async with open_front(model, limits=limits) as front:
        front.workers.hold = True
        two = TEXT | {"n": 2, "temperature": 1}
        asking = asyncio.create_task(front.post("/v1/completions", two))
        await asyncio.wait_for(front.workers.first_token.wait(), 10)
        answer = await front.post("/v1/completions", two | {"stream": stream})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert "2 of at most 3 requests" in answer.json()["error"]["message"]
        assert len(front.workers.asked) == 2
        front.workers.hold = False
        assert (await front.post("/v1/completions", TEXT)).status_code == 200
        front.workers.release()
        assert (await asyncio.wait_for(asking, 10)).status_code == 200
        assert front.intake.admission.in_flight == 0
        assert (await front.post("/v1/completions", two)).status_code == 200


async def test_too_many_prompt_tokens_without_an_answer(model: Path):
    limits = AdmissionOptions(max_in_flight_requests=100, max_queued_tokens=15)
    async with open_front(model, limits=limits) as front:
        front.workers.silent = True
        asking = asyncio.create_task(front.post("/v1/completions", TEXT | {"prompt": [5] * 10}))
        async with asyncio.timeout(10):
            while not front.workers.asked:
                await asyncio.sleep(0.01)
        for stream in (False, True):
            body = TEXT | {"prompt": [5] * 10, "stream": stream}
            answer = await front.post("/v1/completions", body)
            assert answer.status_code == 429, answer.text
            assert "10 of at most 15 prompt tokens wait" in answer.text
        assert (len(front.workers.asked), front.intake.refused) == (1, {"limit": 2})
        front.workers.silent = False
        assert (await front.post("/v1/completions", TEXT | {"prompt": [5] * 5})).status_code == 200
        front.workers.release()
        assert (await asyncio.wait_for(asking, 10)).status_code == 200
        # One that is longer than the limit is taken while nothing waits.
        long = TEXT | {"prompt": [5] * 100}
        assert (await front.post("/v1/completions", long)).status_code == 200


# Deadlines


async def test_a_request_that_is_not_done_in_time_is_a_504(front: Front):
    front.workers.hold = True
    body = TEXT | {"n": 2, "temperature": 1}
    answer = await front.post("/v1/completions", body, **{"x-request-timeout": "2"})
    assert answer.status_code == 504 and "within its 2 s" in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers
    assert {1.9 < request.timeout_s <= 2 for _, request in front.workers.asked} == {True}
    await front.workers.wait_aborted(2)
    assert {r.request_id for _, r in front.workers.asked} == set(front.workers.aborted)
    await front.idle()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("path", "body"), ASKED.items())
async def test_a_stream_that_is_not_done_in_time(front: Front, path: str, body: dict, begun: bool):
    """An error event once it has begun; a status before."""
    front.workers.hold, front.workers.silent = True, not begun
    answer = await front.post(path, body | {"stream": True}, **{"x-request-timeout": "2"})
    assert answer.status_code == (200 if begun else 504), answer.text
    told = _last_event(answer.text) if begun else answer.json()
    error = told["error"]
    assert "did not finish within its 2 s" in error["message"]
    assert error["type"] == "Gateway Timeout" and error["code"] == 504
    assert told.get("type", "error") == "error"
    await front.workers.wait_aborted(1)
    await front.idle()


@pytest.mark.parametrize(("path", "body"), ASKED.items())
async def test_a_stream_that_no_worker_can_take_is_refused(front: Front, path: str, body: dict):
    front.workers.refusals = dict.fromkeys((1, 2), Refused("no", elsewhere=False))
    answer = await front.post(path, body | {"stream": True})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "no"
    await front.idle()


async def test_times_of_the_configuration(model: Path):
    async with open_front(model, default_timeout_s=50, max_timeout_s=60) as front:
        for header, expected in (("", 50), ("20", 20), ("100", 60), ("1e3", 60)):
            headers = {"x-request-timeout": header} if header else {}
            assert (await front.post("/v1/completions", TEXT, **headers)).status_code == 200
            timeout_s = front.workers.asked[-1][1].timeout_s
            assert timeout_s is not None and expected - 5 < timeout_s <= expected


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1,5", "1_0s"])
async def test_a_timeout_that_is_none_is_a_400(front: Front, value: str):
    answer = await front.post("/v1/completions", TEXT, **{"x-request-timeout": value})
    assert answer.status_code == 400 and not front.workers.asked
    error = answer.json()["error"]
    assert error["param"] == "x-request-timeout" and error["type"] == "BadRequestError"
    assert "expected seconds as a number greater than 0" in error["message"]

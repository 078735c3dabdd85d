"""vLLM's OpenAI app over scripted workers: no engine, real HTTP where it matters."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from dynamo_lite.protocol.errors import ConfigError, Refused, StartupError
from dynamo_lite.protocol.generate import LogprobRows
from dynamo_lite.vllm.frontend.openai_app import frontend_config, parse_args
from dynamo_lite.vllm.wire import sampling_from_bytes
from tests.vllm import front_half
from tests.vllm.front_half import CHAT, TEXT, Front, Workers, events, flags, listening, open_front


@pytest.fixture
async def front(model: Path, no_leaked_tasks) -> AsyncIterator[Front]:
    async with open_front(model) as front:
        yield front


# What a client asks for


async def test_several_choices_are_separate_requests_to_workers(front: Front):
    answer = (
        await front.post("/v1/completions", TEXT | {"n": 3, "seed": 7, "temperature": 1})
    ).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abcde"] * 3
    params = [sampling_from_bytes(request.sampling) for _, request in front.workers.asked]
    assert [(p.n, p.seed) for p in params] == [(1, 7), (1, 8), (1, 9)]


async def test_a_stop_string_ends_the_request_at_the_worker(front: Front):
    front.workers.script = b"abcdefgh"
    body = TEXT | {"stop": ["cd"], "max_tokens": 100}
    answer = (await front.post("/v1/completions", body)).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["stop_reason"] == "cd"
    await front.workers.wait_aborted(1)


async def test_reasoning_is_split_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(front_half.write_model(tmp_path))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(tmp_path)
    end, byte_id = tokenizer.convert_tokens_to_ids("</think>"), front_half.byte_id
    monkeypatch.setattr(front_half, "byte_id", lambda b: end if b == ord("|") else byte_id(b))
    async with open_front(tmp_path, "--reasoning-parser=deepseek_r1") as front:
        front.workers.script, body = b"why|so", CHAT | {"max_tokens": 6}
        whole = (await front.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
        assert (whole["reasoning"], whole["content"]) == ("why", "so")
        streamed = events((await front.post("/v1/chat/completions", body | {"stream": True})).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
        for kind, text in (("reasoning", "why"), ("content", "so")):
            assert "".join(delta.get(kind) or "" for delta in deltas) == text
        limited = await front.post("/v1/chat/completions", body | {"thinking_token_budget": 2})
        assert limited.status_code == 200, limited.text


async def test_a_budget_of_thoughts_needs_a_reasoning_parser(front: Front):
    answer = await front.post("/v1/chat/completions", CHAT | {"thinking_token_budget": 2})
    assert answer.status_code == 400 and "reasoning-parser" in answer.text


# Bad input


async def test_what_needs_an_engine_here_is_answered_not_crashed(front: Front):
    with pytest.raises(NotImplementedError):
        await front.app.client.sleep()
    with pytest.raises(NotImplementedError):
        await front.app.client.collective_rpc("anything")
    assert (await front.post("/v1/completions", TEXT)).status_code == 200


def test_wrong_flags_and_a_missing_model_are_clear_errors(model: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="no-such-flag"):
        parse_args([*flags(model), "--no-such-flag=1"])
    with pytest.raises(ConfigError, match="invalid tool call parser"):
        parse_args([f"--model={model}", "--enable-auto-tool-choice", "--tool-call-parser=nope"])
    with pytest.raises(StartupError, match="nowhere"):
        frontend_config(parse_args([f"--model={tmp_path}/nowhere"]))


@pytest.mark.parametrize("more", [[], ["--no-enable-prefix-caching"]])
def test_images_are_named_by_their_content(model: Path, more: list[str]):
    """vLLM would number them, in each Frontend from 1, without both caches."""
    config = frontend_config(parse_args([*flags(model), "--mm-processor-cache-gb=0", *more]))
    assert config.cache_config.enable_prefix_caching


# Workers come, go and refuse


@pytest.mark.parametrize("stream", [False, True])
async def test_no_worker_is_a_503_that_says_when_to_retry(front: Front, stream):
    front.workers.members.clear()
    answer = await front.post("/v1/completions", TEXT | {"stream": stream})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "No worker" in answer.json()["error"]["message"]
    assert front.intake.refused == {"no_worker": 1}
    front.workers.members += Workers().members
    assert (await front.post("/v1/completions", TEXT)).status_code == 200


async def test_a_refusal_for_good_is_a_400_and_is_not_retried(model: Path):
    async with open_front(model, leases=(1, 2)) as front:
        front.workers.refusals = {1: Refused("no such grammar", elsewhere=False)}
        answer = await front.post("/v1/completions", TEXT)
        assert answer.status_code == 400 and "no such grammar" in answer.text
        assert len(front.workers.asked) == 1
        await front.idle()


async def test_a_lost_worker_ends_its_requests_with_a_clear_error(front: Front):
    front.workers.hold = True
    asking = asyncio.create_task(front.post("/v1/completions", TEXT | {"n": 2, "temperature": 1}))
    await asyncio.wait_for(front.workers.first_token.wait(), 10)
    ids = [request.request_id for _, request in front.workers.asked]
    front.workers.members.clear()
    front.workers.lose(ids[:1], "connection reset")
    answer = await asyncio.wait_for(asking, 10)
    assert answer.status_code == 503 and "connection reset" in answer.text
    await front.workers.wait_aborted(1)
    assert front.workers.aborted == ids[1:]
    await front.idle()


async def test_a_delta_that_makes_no_sense_fails_only_its_request(front: Front):
    front.workers.logprobs = lambda token: LogprobRows(1, 1, b"", b"", b"")
    answer = await front.post("/v1/completions", TEXT)
    assert answer.status_code == 500
    await front.workers.wait_aborted(1)
    assert front.intake.in_flight == 0
    front.workers.logprobs = None
    assert (await front.post("/v1/completions", TEXT)).status_code == 200


# Over a socket


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(front: Front, stream):
    front.workers.hold = True
    async with listening(front) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(TEXT | {"stream": stream}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await asyncio.wait_for(front.workers.first_token.wait(), 10)
        if stream:
            await asyncio.wait_for(reader.readuntil(b'"text":"a"'), 10)
        writer.transport.abort()
        await front.workers.wait_aborted(1)
        assert front.workers.aborted == [front.workers.asked[0][1].request_id]
        await front.idle()


async def test_stop_lets_open_responses_finish(front: Front):
    async with listening(front) as (server, url), httpx.AsyncClient(base_url=url) as http:
        gate = asyncio.Event()
        front.workers.gate = gate
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await asyncio.wait_for(front.workers.first_token.wait(), 10)
        stopping = asyncio.create_task(server.stop(10.0))
        with pytest.raises(httpx.ConnectError):
            async with asyncio.timeout(10), httpx.AsyncClient(base_url=url) as late:
                while True:
                    await late.get("/health")
        assert not stopping.done()
        gate.set()
        assert (await asking).json()["choices"][0]["text"] == "abcde"
        await asyncio.wait_for(stopping, 10)


async def test_stop_cancels_what_does_not_finish(front: Front):
    front.workers.hold = True
    async with listening(front) as (server, url), httpx.AsyncClient(base_url=url) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": True}))
        await asyncio.wait_for(front.workers.first_token.wait(), 10)
        await asyncio.wait_for(server.stop(0.1), 10)
        await front.workers.wait_aborted(1)
        await asyncio.gather(asking, return_exceptions=True)

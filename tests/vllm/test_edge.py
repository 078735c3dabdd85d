"""Bad input and clients that disconnect: they are refused or dropped, and the graph works as
before."""

import asyncio
import contextlib
import pickle
import random
import re
import socket
import sys
import time

import httpx
import msgspec
import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_sealed
from dynamo_lite.protocol.errors import DeadlineExceeded
from dynamo_lite.protocol.generate import Hello
from dynamo_lite.protocol.prefill import (
    CancelAttempt,
    Claim,
    RemotePrefillRequest,
    WriterDone,
)
from dynamo_lite.request_plane.framing import parse_address
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.vllm.asking import ask, assert_same, prompt_ids
from tests.vllm.graph import NAMESPACE, Graph, PlainServer, eventually

pytestmark = pytest.mark.timeout(300)

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
#: Of requests beside a flood that does not end by itself.
_FLOODED_ROUNDS = 5
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

BAD_REQUESTS: dict[str, tuple[str, object]] = {
    "no JSON": ("chat/completions", b"{"),
    "no object": ("completions", b"[1]"),
    "no messages": ("chat/completions", {"model": "tiny"}),
    "messages of no list": ("chat/completions", CHAT | {"messages": "hi"}),
    "a role without content": ("chat/completions", CHAT | {"messages": [{"role": 7}]}),
    "unknown model": ("completions", TEXT | {"model": "other"}),
    "negative temperature": ("completions", TEXT | {"temperature": -1}),
    "no tokens wanted": ("completions", TEXT | {"max_tokens": -1}),
    "no choices wanted": ("chat/completions", CHAT | {"n": 0}),
    "two choices without a draw": ("completions", TEXT | {"n": 2, "temperature": 0}),
    "too many logprobs": ("completions", TEXT | {"logprobs": 4000}),
    "top_logprobs without logprobs": ("chat/completions", CHAT | {"top_logprobs": 2}),
    "stream options without a stream": (
        "completions",
        TEXT | {"stream_options": {"include_usage": True}},
    ),
    "a tool that is not there": ("chat/completions", CHAT | {"tool_choice": "required"}),
    "another tool": (
        "chat/completions",
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ),
    "a schema that is none": (
        "chat/completions",
        CHAT
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 7}}},
    ),
    "a grammar that is none": (
        "chat/completions",
        CHAT | {"structured_outputs": {"grammar": "root ::= ("}},
    ),
    "a regex that is none": ("completions", TEXT | {"structured_outputs": {"regex": "("}}),
    "empty prompt": ("completions", TEXT | {"prompt": []}),
    "tokens outside the vocabulary": ("completions", TEXT | {"prompt": [1, 99999]}),
    "negative tokens": ("completions", TEXT | {"prompt": [-5]}),
    "prompt over the model's length": (
        "completions",
        TEXT | {"prompt": prompt_ids(8200, seed=300)},
    ),
    "chat over the model's length": (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": "plain " * 9000}]},
    ),
    "no such path": ("complete", TEXT),
}


def post(url: str, path: str, body: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {"content-type": "application/json"}
    return httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=60)


@pytest.mark.parametrize("name", list(BAD_REQUESTS))
def test_bad_requests_get_vllms_own_answer(disagg: Graph, reference: PlainServer, name: str):
    path, body = BAD_REQUESTS[name]
    expected, got = post(reference.url, path, body), post(disagg.url, path, body)
    assert got.status_code == expected.status_code and got.status_code >= 400, got.text
    assert_same(_without_ids(got.json()), _without_ids(expected.json()))
    if name.endswith("length"):
        assert got.status_code == 400


def test_a_wrong_method_gets_vllms_own_answer(disagg: Graph, reference: PlainServer):
    got, expected = (httpx.get(f"{s.url}/v1/completions") for s in (disagg, reference))
    assert (got.status_code, got.json()) == (expected.status_code, expected.json())
    assert got.status_code == 405


async def test_a_client_that_leaves_mid_stream_frees_the_engine(disagg: Graph):
    (before,) = await disagg.pools()
    body = TEXT | {
        "prompt": prompt_ids(900, seed=310),
        "max_tokens": 7000,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(base_url=disagg.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert "data:" in await anext(lines)
        assert disagg.health("VllmWorker")["in_flight"] == 1
    eventually(
        lambda: (lambda h: h["in_flight"] == h["running"] == 0)(disagg.health("VllmWorker")),
        timeout_s=10,
        what="the engine runs nothing",
    )
    (after,) = await disagg.pools()
    assert after.free_blocks == before.free_blocks


@pytest.mark.parametrize(
    ("kind", "count", "size", "status"),
    [
        ("length", 100, 100_000_000, "413"),
        ("chunked", 100, 100_000_000, "413"),
        ("ids", 40, 300_000, "400"),
        ("slow", 100, 1_000_000, ""),
        ("slow reader", 10, 0, ""),
    ],
    ids=["beyond the limit", "in chunks", "below it", "sent slowly", "read slowly"],
)
async def test_floods_cost_nobody_a_lease_or_a_token(
    disagg: Graph, reference: PlainServer, kind: str, count: int, size: int, status: str
):
    """status: of all answers; empty: there is none before the flood is ended."""

    async def leases() -> set[tuple[str, int]]:
        return {(record.component, record.lease_id) for record in await disagg.records()}

    request = {"prompt": prompt_ids(40, seed=340), "max_tokens": 150, "temperature": 0}
    expected = ask(reference.url, "completions", request)
    before = await leases()
    command = (sys.executable, "-m", "tests.vllm.flood", disagg.url, kind, str(count), str(size))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None and await process.stdout.readline()
    try:
        rounds = 0
        while process.returncode is None and (status or rounds < _FLOODED_ROUNDS):
            asked = (asyncio.to_thread(ask, disagg.url, "completions", request) for _ in range(4))
            for answer in await asyncio.gather(*asked):
                assert_same(answer, expected)
            rounds += 1
        if not status:
            process.kill()
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status:
        assert msgspec.json.decode(said) == {status: count}
    assert await leases() == before


async def test_cancelled_remote_prefills_give_their_blocks_back(
    disagg: Graph, reference: PlainServer
):
    """Cancelled anywhere: before the decision, on the queue, claimed, written, decoding."""
    rng = random.Random(5)
    (before,) = await disagg.pools()
    async with httpx.AsyncClient(base_url=disagg.url, timeout=60) as http:

        async def leave(number: int) -> bool:
            body = TEXT | {"prompt": prompt_ids(3000 + number, seed=320), "max_tokens": 60}
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            done, _ = await asyncio.wait({asking}, timeout=rng.uniform(0.0, 2.0))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return not done

        left = await asyncio.gather(*(leave(number) for number in range(20)))
    assert sum(left) >= 10
    await disagg.settled(before.free_blocks)
    request = {"prompt": prompt_ids(3000, seed=320), "max_tokens": 16, "temperature": 0}
    assert_same(ask(disagg.url, "completions", request), ask(reference.url, "completions", request))


GARBAGE = {
    "nothing": b"",
    "no msgpack": b"\xc1" * 100,
    "a pickle": pickle.dumps({"request_id": "x"}),
    "a number": msgspec.msgpack.encode(7),
    "an empty map": msgspec.msgpack.encode({}),
    "nested": b"\x91" * 5000,
    "long": bytes(900_000),
}


DROPPED = "dynamo_lite_dropped_messages_total"


@pytest.mark.parametrize("payload", list(GARBAGE.values()), ids=list(GARBAGE))
async def test_garbage_on_the_subjects(disagg: Graph, reference: PlainServer, payload: bytes):
    (before,) = await disagg.pools()
    async with disagg.messaging() as messaging:
        for subject in await _subjects(disagg):
            await messaging.publish(subject, payload)
    await disagg.publish_job(payload)
    await _answers(disagg, reference)
    await disagg.settled(before.free_blocks)
    # What comes often is logged seldom, so the lines may be of an earlier payload.
    assert "dropped a message: malformed" in disagg.log_of("VllmWorker")
    assert "dropped a message: malformed" in disagg.log_of("PrefillWorker")
    assert re.search(r"job \d+ dropped", disagg.log_of("PrefillWorker"))


async def test_a_stranger_without_the_secret_is_not_heard(disagg: Graph, reference: PlainServer):
    """It reaches NATS, and sends what the graph's own processes might."""
    (before,) = await disagg.pools()
    engine, writer = await _who(disagg)
    first_token = names.first_token_subject(NAMESPACE, engine)
    dropped = disagg.count("VllmWorker", DROPPED, where="unauthentic")
    stay = encode_sealed(Claim(attempt="forged", writer_lease_id=writer))
    async with NatsMessaging(disagg.nats_url) as messaging:
        with pytest.raises(DeadlineExceeded):
            await messaging.request(first_token, stay, timeout_s=0.5)
        for subject in await _subjects(disagg):
            await messaging.publish(subject, stay)
    await _answers(disagg, reference)
    await disagg.settled(before.free_blocks)
    eventually(
        lambda: disagg.count("VllmWorker", DROPPED, where="unauthentic") > dropped,
        timeout_s=10,
        what="its messages are counted",
    )
    assert f"dropped a message on {first_token}" in disagg.log_of("VllmWorker")
    assert "from the queue: not authentic" in disagg.log_of("PrefillWorker")


async def test_wrong_messages_on_the_subjects(disagg: Graph, reference: PlainServer):
    """Well-formed, but about things that are not so."""
    (before,) = await disagg.pools()
    engine, writer = await _who(disagg)
    job = RemotePrefillRequest(
        engine_id=engine,
        request_id="forged",
        attempt="forged",
        prompt_token_ids=prompt_ids(100, seed=1),
        num_computed_tokens=0,
        block_ids=[1, 2, 3, 4],
        deadline=time.time() + 30,
    )
    strange = msgspec.structs.replace(job, engine_id="no-such-engine", attempt="other")
    later = msgspec.structs.replace(job, wire_version=99)
    bytes_before = disagg.count("PrefillWorker", "dynamo_lite_kv_transfer_bytes_total")
    async with disagg.messaging() as messaging:
        claim = names.claim_subject(NAMESPACE, engine)
        reply = await messaging.request(
            claim, encode_sealed(Claim(attempt="forged", writer_lease_id=writer)), timeout_s=5
        )
        assert b"Refused" in reply, reply
        done = WriterDone(attempt="forged", outcome="written")
        await messaging.publish(names.writer_done_subject(NAMESPACE, engine), encode_sealed(done))
        cancel = CancelAttempt(attempt="forged", engine_id=engine)
        await messaging.publish(names.cancel_subject(NAMESPACE, writer), encode_sealed(cancel))
        for message in (job, strange, later):
            await disagg.publish_job(encode_sealed(message))
    await _answers(disagg, reference)
    await disagg.settled(before.free_blocks)
    # The one long prompt of `_answers`, and nothing for the forged jobs.
    sent = disagg.count("PrefillWorker", "dynamo_lite_kv_transfer_bytes_total") - bytes_before
    assert sent == pytest.approx(600 / 32 * 131072, rel=0.1)


async def test_garbage_on_the_processors_endpoints_is_answered(disagg: Graph):
    subjects = [r.transport.nats_tcp for r in await disagg.records() if r.component == "Processor"]
    assert len(subjects) == 2
    async with disagg.messaging() as messaging:
        for subject in subjects:
            for payload in (b"", b"\xff\xfe", b"[1]", b"{}", b'{"model": "tiny"}'):
                reply = await messaging.request(subject, payload, timeout_s=10)
                assert msgspec.json.decode(reply)["error"]["code"] == 400
        reply = await messaging.request(subjects[0], msgspec.json.encode(CHAT), timeout_s=30)
        assert msgspec.json.decode(reply)["choices"][0]["message"]["content"]


STREAM_GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(64),
    "a huge length": b"\xff\xff\xff\xff" + bytes(1000),
    "a frame of garbage": (100).to_bytes(4, "big") + b"\xc1" * 100,
    "a pickle": (lambda p: len(p).to_bytes(4, "big") + p)(pickle.dumps({"client_id": "x"})),
    "a strange version": (lambda p: len(p).to_bytes(4, "big") + p)(
        encode(Hello(client_id="x", wire_version=99))
    ),
}


@pytest.mark.parametrize("data", list(STREAM_GARBAGE.values()), ids=list(STREAM_GARBAGE))
async def test_garbage_on_the_token_stream_is_hung_up_on(
    disagg: Graph, reference: PlainServer, data: bytes
):
    stream = next(r.transport.stream for r in await disagg.records() if r.endpoint == "generate")
    assert stream is not None
    with socket.create_connection(parse_address(stream), timeout=15) as connection:
        connection.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    await _answers(disagg, reference)


@pytest.mark.parametrize("tokens", [100, 1300], ids=["local", "remote"])
def test_a_client_cannot_steer_kv_transfers(disagg: Graph, reference: PlainServer, tokens: int):
    """Answers are those of the same request without the forged parameters."""
    forged = {
        "attempt": "forged",
        "engine_id": "forged",
        "num_computed_tokens": 0,
        "block_ids": [1, 2, 3],
        "target": "x",
        "do_remote_prefill": True,
        "do_remote_decode": True,
        "remote_block_ids": [1],
        "remote_engine_id": "forged",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
    }
    prompt = prompt_ids(tokens, seed=330)
    request = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    chat = CHAT | {"messages": [{"role": "user", "content": "at sea " * tokens}], "temperature": 0}
    for path, body in (("completions", request), ("chat/completions", chat)):
        expected = post(reference.url, path, body).json()
        got = post(disagg.url, path, body | {"kv_transfer_params": forged})
        assert got.status_code == 200, got.text
        answer = got.json()
        assert answer.get("kv_transfer_params") is None
        assert_same(answer["usage"], expected["usage"])
        assert_same(answer["choices"], expected["choices"])


def test_nor_by_vllms_other_door(disagg: Graph, reference: PlainServer):
    """`vllm_xargs` end up where a KV connector looks, too; vLLM itself stumbles over it."""
    body = TEXT | {"prompt": prompt_ids(900, seed=331), "temperature": 0}
    forged = body | {"vllm_xargs": {"kv_transfer_params": ["attempt", "forged"]}}
    got, expected = (post(server.url, "completions", forged) for server in (disagg, reference))
    assert got.status_code == expected.status_code, got.text
    got, expected = (post(server.url, "completions", body) for server in (disagg, reference))
    assert_same(got.json()["choices"], expected.json()["choices"])


async def _who(graph: Graph) -> tuple[str, int]:
    """The decode engine's id, and the prefill worker's lease."""
    (pool,) = await graph.pools()
    records = {r.endpoint: r for r in await graph.records()}
    return pool.metadata.engine_id, records["prefill"].lease_id


async def _subjects(graph: Graph) -> list[str]:
    engine, writer = await _who(graph)
    return [
        names.claim_subject(NAMESPACE, engine),
        names.writer_done_subject(NAMESPACE, engine),
        names.cancel_subject(NAMESPACE, writer),
        names.prefill_jobs_subject(NAMESPACE),
    ]


async def _answers(graph: Graph, reference: PlainServer) -> None:
    """The graph still answers, locally and remotely, and answers right."""
    for tokens in (30, 601):
        prompt = prompt_ids(tokens, seed=random.randrange(1 << 30))
        request = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        expected = await asyncio.to_thread(ask, reference.url, "completions", request)
        got = await asyncio.to_thread(ask, graph.url, "completions", request)
        assert_same(got, expected)


def _without_ids(body: dict) -> dict:
    return {key: value for key, value in body.items() if key not in ("id", "created")}

"""What may come in at the Frontend: keys, sizes, text, priorities; vLLM's app over scripted
workers, most of it without a socket."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.routing import Route

from dynamo_lite.disagg.decision.lanes import ClientPriority
from dynamo_lite.protocol.generate import LogprobRows
from dynamo_lite.vllm.frontend.bodies import MAX_BODY_BYTES, Bodies, BodyLimits, body_limit
from dynamo_lite.vllm.frontend.openai_app import OPEN_PATHS
from tests.vllm.front_half import CHAT, TEXT, Front, byte_id, events, listening, open_front

JSON = {"content-type": "application/json"}


@pytest.fixture
async def front(model: Path, no_leaked_tasks) -> AsyncIterator[Front]:
    async with open_front(model) as front:
        yield front


async def post_bytes(front: Front, path: str, body: bytes) -> httpx.Response:
    return await front.http.post(path, content=body, headers=JSON)


# Keys


def routes(front: Front) -> list[tuple[str, str]]:
    """Every method and path that the app answers."""
    app = front.app.asgi
    while not hasattr(app, "routes"):
        app = getattr(app, "_app", None) or app.app
    return [
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    ]


async def test_every_route_but_the_open_ones_asks_for_the_key(model: Path, no_leaked_tasks):
    async with open_front(model, "--api-key", "secret", "other") as front:
        asked = set()
        for method, path in routes(front):
            url = path.replace("{", "").replace("}", "")
            answer = await front.http.request(method, url, json={})
            is_open = path in OPEN_PATHS and method in ("GET", "HEAD")
            assert (answer.status_code != 401) == is_open, (method, path, answer.status_code)
            asked.add(path)
        assert asked >= {
            *("/v1/completions", "/tokenize", "/detokenize", "/load", "/docs"),
            *("/openapi.json", "/scale_elastic_ep", "/generative_scoring", "/v1/messages"),
        }
        assert not front.workers.asked
        for path in ("/none-such", "/V1/completions", "//v1/completions", "/health/../load"):
            assert (await front.http.get(path)).status_code == 401, path
        options = await front.http.request("OPTIONS", "/v1/completions")
        assert options.status_code != 401


@pytest.mark.parametrize(
    ("header", "welcome"),
    [
        ("Bearer secret", True),
        ("bearer other", True),
        ("Bearer secre", False),
        ("Basic secret", False),
        ("", False),
    ],
)
async def test_which_keys_are_taken(model: Path, header: str, welcome: bool):
    async with open_front(model, "--api-key", "secret", "other") as front:
        for path, body in (("/v1/completions", TEXT), ("/tokenize", {"prompt": "hi"})):
            answer = await front.post(path, body, authorization=header)
            assert answer.status_code == (200 if welcome else 401)
            if not welcome:
                error = answer.json()["error"]
                assert error["code"] == 401 and "API key" in error["message"]
                assert answer.headers["www-authenticate"] == "Bearer"
        await front.idle()


async def test_open_paths_under_a_root_path(model: Path):
    async with open_front(model, "--api-key=secret", "--root-path=/llm") as front:
        for path, status in (("/health", 200), ("/llm/health", 200), ("/llm/load", 401)):
            assert (await front.http.get(path)).status_code == status


# Sizes


def test_the_limit_follows_the_models_length():
    assert body_limit(256) < 3 << 20
    # A prompt of six bytes for each character and six characters for each token fits.
    assert body_limit(32_768) > 36 * 32_768
    assert body_limit(10_000_000) == MAX_BODY_BYTES == 32 << 20
    assert body_limit(256, media=True) == MAX_BODY_BYTES


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_a_413(model: Path, chunked: bool, no_leaked_tasks):
    async with open_front(model, max_body_bytes=10_000) as front:
        for size, status in ((9_900, 200), (10_100, 413)):
            body = json.dumps(TEXT | {"user": ""}).encode()
            body = body.replace(b'"user": ""', b'"user": "%s"' % (b"a" * (size - len(body))))

            async def parts(body: bytes = body) -> AsyncIterator[bytes]:
                for start in range(0, len(body), 1000):
                    yield body[start : start + 1000]

            content = parts() if chunked else body
            answer = await front.http.post("/v1/completions", content=content, headers=JSON)
            assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["code"] == 413 and "more than 10000 bytes" in error["message"]
        assert "max-body-bytes" in error["message"]
        assert answer.headers["connection"] == "close"
        assert len(front.workers.asked) == 1


async def test_a_length_that_is_too_large_is_refused_before_anything_is_sent(model: Path):
    async with open_front(model, max_body_bytes=10_000) as front, listening(front) as (_, url):
        _, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n"
        writer.write(f"{head}expect: 100-continue\r\n\r\n".encode())
        async with asyncio.timeout(10):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 413") and b"100 Continue" not in answer
        writer.close()


class Recorder:
    """An app that reads its body, or does not, and records its length.

    blocks_s: CPU time for which it parses after that, and the event loop stands still.
    """

    def __init__(self, *, reads: bool = True, blocks_s: float = 0.0):
        self.reads, self._blocks_s = reads, blocks_s
        self.sizes: list[int] = []
        self.within = 0

    async def __call__(self, scope, receive, send) -> None:
        assert not self.within, "another one is parsed"
        self.within, size = 1, 0
        if self.reads:
            message = await receive()
            size = len(message["body"])
            assert not message["more_body"]
        until = time.thread_time() + self._blocks_s
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0)
        self.sizes.append(size)
        self.within = 0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def client_of(app: Recorder, **limits: float) -> tuple[Bodies, httpx.AsyncClient]:
    bodies = Bodies(app, BodyLimits(**{"max_bytes": 1000, "large_bytes": 100, **limits}))
    transport = httpx.ASGITransport(app=bodies)
    return bodies, httpx.AsyncClient(transport=transport, base_url="http://app")


@pytest.mark.parametrize("reads", [True, False])
async def test_large_bodies_take_turns_whether_they_are_read_or_not(reads: bool):
    """Streams have as much time between two of them as the first one has taken."""
    app = Recorder(reads=reads, blocks_s=0.01)
    bodies, http = client_of(app)
    async with http, asyncio.timeout(10):
        began = time.monotonic()
        answers = await asyncio.gather(*(http.post("/", content=500 * b" ") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert app.sizes == 20 * [500 if reads else 0] and bodies._held == 0
        assert not reads or time.monotonic() - began > 39 * 0.01


async def test_large_bodies_that_wait_are_bounded():
    app = Recorder()
    bodies, http = client_of(app, held_bytes=1500, body_s=60.0)
    more = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield 500 * b" "
        await more.wait()
        yield b" "

    async with http, asyncio.timeout(10):
        waiting = [asyncio.create_task(http.post("/", content=slowly())) for _ in range(3)]
        while bodies._held < 1500:
            await asyncio.sleep(0)
        refused = await http.post("/", content=500 * b" ")
        assert refused.status_code == 503 and "waiting already" in refused.text
        # Small ones do not count.
        assert (await http.post("/", content=50 * b" ")).status_code == 200
        more.set()
        statuses = [(await task).status_code for task in waiting]
        # The first byte over it is refused; what the others had is free again then.
        assert sorted(statuses) == [200, 200, 503]
        assert (await http.post("/", content=500 * b" ")).status_code == 200
        assert bodies._held == 0


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_a_body_is_not_waited_for_where_none_is_expected(method: str):
    """The key guard lets OPTIONS, and GET of open paths, pass without a key."""
    app = Recorder(reads=False)
    bodies, http = client_of(app, body_s=60.0)

    async def never() -> AsyncIterator[bytes]:
        yield 500 * b" "
        await asyncio.sleep(3600)

    async with http, asyncio.timeout(10):
        assert (await http.request(method, "/", content=never())).status_code == 200
        assert bodies._held == 0


async def test_a_body_that_does_not_come_is_given_up():
    app = Recorder()
    bodies, http = client_of(app, body_s=0.05)

    async def never() -> AsyncIterator[bytes]:
        yield 500 * b" "
        await asyncio.sleep(3600)

    async with http, asyncio.timeout(10):
        answer = await http.post("/", content=never())
        assert answer.status_code == 408 and "within 0.05 s" in answer.text
        assert bodies._held == 0 and app.sizes == []


# Text

HALF = {"role": "user", "content": "\ud800"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT | {"prompt": "\ud83d\ud83d\ude00"}),
        ("/v1/completions", TEXT | {"stop": "a\udfffb"}),
        ("/v1/completions", TEXT | {"logit_bias": {"\ud800": 1}}),
        ("/v1/completions", TEXT | {"vllm_xargs": {"a": "\ud800"}}),
        ("/v1/chat/completions", CHAT | {"messages": [HALF]}),
        ("/v1/messages", CHAT | {"messages": [HALF]}),
        ("/v1/responses", {"model": "tiny", "input": "\ud800"}),
        ("/tokenize", {"model": "tiny", "prompt": "\ud800"}),
        ("/v1/completions", b'{"model":"tiny","prompt":"\xed\xa0\x80"}'),
        ("/v1/completions", b'{"model":"tiny","prompt":"\xff"}'),
    ],
    ids=str,
)
async def test_what_is_no_text_is_a_400_and_reaches_no_worker(
    front: Front, path: str, body: dict | bytes
):
    """`json.loads` accepts half of a surrogate pair."""
    whole = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await post_bytes(front, path, whole)
    assert answer.status_code == 400, answer.text
    assert not front.workers.asked
    await front.idle()


# Priorities


@pytest.mark.parametrize(
    ("rule", "granted"), [("ignore", [0, 0, 0]), ("lower-only", [0, 0, 3]), ("any", [-5, 0, 3])]
)
async def test_what_a_clients_priority_may_do(
    model: Path, rule: ClientPriority, granted: list[int]
):
    messages = [{"role": "user", "content": "hi"}]
    bodies = (
        ("/v1/completions", TEXT),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 2}),
        ("/v1/completions", TEXT | {"n": 2, "temperature": 1}),
        ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 2}),
    )
    async with open_front(model, client_priority=rule) as front:
        for path, body in bodies:
            for asked, expected in zip((-5, 0, 3), granted, strict=True):
                front.workers.asked.clear()
                answer = await front.post(path, body | {"priority": asked})
                assert answer.status_code == 200, (path, answer.text)
                got = {request.priority for _, request in front.workers.asked}
                # vLLM's /v1/messages has no such field.
                assert got == ({0} if path == "/v1/messages" else {expected}), path
        await front.idle()


# Validation


async def test_the_first_error_of_a_list_ends_its_validation(front: Front):
    """All errors of all elements would be 2.5 million, and hold the event loop for 17 s."""
    body = json.dumps(CHAT | {"messages": [{}] * 150_000}).encode()
    began = time.process_time()
    answer = await post_bytes(front, "/v1/chat/completions", body)
    assert answer.status_code == 400 and time.process_time() - began < 5
    error = answer.json()["error"]
    assert error["message"].startswith("15 validation errors") and "messages.0" in error["param"]
    responses = json.dumps({"model": "tiny", "input": [{}] * 100_000}).encode()
    began = time.process_time()
    answer = await post_bytes(front, "/v1/responses", responses)
    assert answer.status_code == 400 and time.process_time() - began < 5
    # It would collect all errors.
    assert (await post_bytes(front, "/invocations", body)).status_code == 404


async def test_a_batch_has_no_more_conversations_than_a_list_has_prompts(front: Front):
    path, talk = "/v1/chat/completions/batch", CHAT["messages"]
    assert (await front.post(path, CHAT | {"messages": [talk] * 2})).status_code == 200
    front.workers.asked.clear()
    answer = await front.post(path, CHAT | {"messages": [talk] * 1025})
    assert answer.status_code == 400 and "1025 conversations" in answer.json()["error"]["message"]
    assert not front.workers.asked


async def test_prompt_logprobs_are_in_the_answer(front: Front):
    prompt = "hello"
    rows = len(prompt) - 1
    ids = np.array([[byte_id(ord(c))] for c in prompt[1:]], "<i8")
    whole = LogprobRows(
        rows,
        1,
        ids.tobytes(),
        np.linspace(-1, -2, rows, dtype="<f4").tobytes(),
        np.arange(1, rows + 1, dtype="<i8").tobytes(),
    )
    front.workers.prompt_logprobs = [whole]
    answer = await front.post("/v1/completions", TEXT | {"prompt_logprobs": 0})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["text"] == "abcde" and len(choice["prompt_logprobs"]) == len(prompt)


async def test_a_client_that_does_not_read_costs_no_other_stream_a_token(
    model: Path, no_leaked_tasks
):
    async with open_front(model, "--max-model-len=1024") as front, listening(front) as (_, url):
        loop, address = asyncio.get_running_loop(), url.removeprefix("http://").split(":")
        body = json.dumps(TEXT | {"max_tokens": 1000, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.socket() as slow:
            slow.setblocking(False)
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least that there is
            await loop.sock_connect(slow, (address[0], int(address[1])))
            await loop.sock_sendall(
                slow, b"%scontent-length: %d\r\n\r\n" % (head, len(body)) + body
            )
            await asyncio.wait_for(front.workers.first_token.wait(), 10)
            async with asyncio.timeout(20), httpx.AsyncClient(base_url=url) as http:
                for _ in range(20):
                    answer = await http.post("/v1/completions", json=TEXT | {"stream": True})
                    assert "".join(e["choices"][0]["text"] for e in events(answer.text)) == "abcde"
            assert front.intake.in_flight <= 1
        await front.idle()

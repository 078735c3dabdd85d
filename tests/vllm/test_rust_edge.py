"""vLLM's Rust frontend as another edge of the shared graph: remote prefills, first tokens from the
prefill worker, and what is killed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.compat import vllm_version
from dynamo_lite.vllm.edge_choice import PROGRAM, beside_vllm, find_program
from tests.vllm.asking import Stream, assert_same, client, joined, prompt_ids, tokens_of
from tests.vllm.conftest import Stage
from tests.vllm.graph import (
    PAIR_OPTIONS,
    Graph,
    PlainServer,
    command_line,
    descendants_of,
    eventually,
    reached,
)
from tests.vllm.test_answers import CHATS, COMPLETIONS
from tests.vllm.test_first_token import DIFFERENT, arrivals, arrived, handed_over
from tests.vllm.test_migration import is_back

KEPT = Path(".dynamo-lite") / PROGRAM


def _program() -> Path | None:
    try:
        return find_program(str(beside_vllm() or KEPT), vllm_version())
    except StartupError:
        return None


BINARY = _program()

NEEDS_BINARY = pytest.mark.skipif(
    BINARY is None, reason="no vllm-rs: scripts/get_vllm_rs could not get it"
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("pair"), NEEDS_BINARY]

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
LONG = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
MOVED = "dynamo_lite_requests_moved_total"

#: Fields of an answer's choice that both edges have.
_FIELDS = ("index", "text", "finish_reason", "stop_reason")
#: Fields of a request that are vLLM's own.
_OWN = ("ignore_eos", "structured_outputs", "return_token_ids")


@pytest.fixture(scope="module")
def rust(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    """A lone Frontend with the Rust edge, before the workers of the graph."""
    graph = stage.shared(PAIR_OPTIONS)
    options = [*graph.servers, "--Frontend.edge=rust", f"--Frontend.edge-binary={BINARY}"]
    directory = tmp_path_factory.mktemp("rust-edge")
    with Graph(directory, options=options, service="Frontend") as frontend:
        yield frontend


def ask(
    graph: Graph | PlainServer, kind: str, request: dict[str, Any], *, stream: bool
) -> dict[str, Any]:
    """Choices and usage, in the form that both edges have."""
    extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    request = {**known({**request, "return_token_ids": True}), **extra}
    with client(graph.url) as api:
        create = api.chat.completions.create if kind == "chat" else api.completions.create
        answer = create(model="tiny", **request)
        chunks = [chunk.model_dump() for chunk in answer] if stream else []
        whole = joined(chunks) if stream else answer.model_dump()
    tokens: list[int] = []
    for choice in whole["choices"] if not stream else _choices(chunks):
        tokens += choice.get("token_ids") or ()
    return {
        "choices": [_choice(choice) for choice in whole["choices"]],
        "tokens": tokens,
        "usage": [whole["usage"][key] for key in ("prompt_tokens", "completion_tokens")],
    }


def _choices(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def known(request: dict[str, Any]) -> dict[str, Any]:
    """The request with vLLM's own fields where the client wants them."""
    own = {key: value for key, value in request.items() if key in _OWN}
    return {**{key: value for key, value in request.items() if key not in own}, "extra_body": own}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice.get("text") or (choice.get("message") or {}).get("content") or ""
    kept = {key: choice.get(key) for key in _FIELDS}
    return {**kept, "text": complete(text), "logprobs": _logprobs(choice.get("logprobs"))}


def complete(text: str) -> str:
    """Where an answer ends in the middle of a character, the Rust edge sends the incomplete
    part."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def _logprobs(given: Any) -> list[float]:
    """The log-probability of each token. The edges write pieces of characters differently."""
    if not given:
        return []
    if isinstance(given, dict) and given.get("content") is not None:
        given = given["content"]
    if isinstance(given, dict):
        return given["token_logprobs"]
    return [row["logprob"] if isinstance(row, dict) else row[1] for row in given]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_answers_begin_with_the_prefill_workers_token(
    pair: Graph, rust: Graph, reference: PlainServer, stream: bool
):
    since, committed = arrivals(pair), handed_over(pair)
    different = pair.count("VllmWorker", DIFFERENT)
    for number, tokens in enumerate((700, 1601)):
        request = {"prompt": prompt_ids(tokens, seed=950 + number + 10 * stream), **GREEDY}
        got = ask(rust, "completions", request, stream=stream)
        assert len(got["tokens"]) == 24 and got["choices"][0]["text"]
        assert_same(got, ask(reference, "completions", request, stream=stream))
    eventually(lambda: committed() == 2, timeout_s=5, what="both prompts are handed over")
    # The decode engine's token may come first now and then.
    assert arrived(since, 2)["sent"] >= 1
    assert pair.count("VllmWorker", DIFFERENT) == different


#: Several choices and several prompts are a 400; a tool needs a parser (docs/edge.md).
NOT_ANSWERED = {"two choices", "several prompts", "any tool", "this tool"}
ANSWERED = [
    (kind, name)
    for kind, requests in (("chat", CHATS), ("completions", COMPLETIONS))
    for name in requests
    if name not in NOT_ANSWERED
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("kind", "name"), ANSWERED)
def test_answers_are_those_of_plain_vllm(
    rust: Graph, reference: PlainServer, kind: str, name: str, stream: bool
):
    request = (CHATS if kind == "chat" else COMPLETIONS)[name]
    expected = ask(reference, kind, request, stream=stream)
    [choice] = expected["choices"]
    assert expected["tokens"] and choice["text"]
    if stream and request.get("echo"):
        # A stream of `vllm-rs` has no log-probabilities of the prompt.
        choice["logprobs"] = choice["logprobs"][-request["max_tokens"] :]
    assert_same(ask(rust, kind, request, stream=stream), expected)


def test_a_disconnect_reaches_the_engine(rust: Graph, pair: Graph):
    def running() -> int:
        """Requests in flight at both decode workers."""
        return sum(pair.health("VllmWorker", instance)["in_flight"] for instance in range(2))

    body = {"model": "tiny", "prompt": "hi", **LONG, "max_tokens": 8000, "stream": True}
    with httpx.stream("POST", f"{rust.url}/v1/completions", json=body, timeout=60):
        # The head of a stream comes before a worker has the request.
        eventually(lambda: running() == 1, timeout_s=30, what="it runs")
    eventually(lambda: running() == 0, timeout_s=10, what="no engine has a request")
    assert rust.health("Frontend")["requests"] == 0


@pytest.mark.heavy
def test_a_killed_rust_frontend_is_started_again(rust: Graph, reference: PlainServer):
    before = rust.process("Frontend")
    os.kill(rust_pid(before.pid), signal.SIGKILL)
    eventually(
        lambda: (
            rust.process("Frontend").pid != before.pid and rust.process("Frontend").state == "ready"
        ),
        timeout_s=180,
        what="the Frontend is back",
    )
    request = {"prompt": prompt_ids(40, 900), **GREEDY}
    got = ask(rust, "completions", request, stream=False)
    assert_same(got, ask(reference, "completions", request, stream=False))


def rust_pid(frontend: int) -> int:
    [pid] = [pid for pid in descendants_of(frontend) if PROGRAM in command_line(pid)]
    return pid


@pytest.mark.heavy
async def test_streams_go_on_when_their_worker_is_killed(
    rust: Graph, pair: Graph, reference: PlainServer
):
    requests = [{"prompt": prompt_ids(30 + i, 910 + i), **LONG} for i in range(4)]
    expected = await tokens_of(reference.url, requests)
    victim = pair.process("VllmWorker", 1)
    streams = [Stream("completions", request) for request in requests]
    async with httpx.AsyncClient(base_url=rust.url, timeout=120) as http:
        answers = [asyncio.create_task(stream.run(http)) for stream in streams]
        await reached(
            lambda: any(len(stream.tokens().get(0, [])) > 10 for stream in streams),
            timeout_s=60,
            what="a stream has begun",
        )
        os.kill(victim.pid, signal.SIGKILL)
        assert [(await answer)["tokens"][0] for answer in answers] == expected
    assert rust.count("Frontend", MOVED) > 0
    await reached(lambda: is_back(pair, 1, victim.pid), timeout_s=180, what="the worker is back")


@pytest.mark.heavy
def test_it_dies_with_the_frontend(rust: Graph):
    before = rust.process("Frontend")
    child = rust_pid(before.pid)
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: not command_line(child), timeout_s=10, what="vllm-rs has ended")

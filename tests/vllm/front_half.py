"""What the tests of vLLM's front half need: a model directory without weights, and
workers that live in this process and answer with scripted tokens."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import httpx

from dynamo_lite.disagg.decision.lanes import ClientPriority
from dynamo_lite.protocol.errors import NoResponders
from dynamo_lite.protocol.generate import GenerateRequest, LogprobRows, PrefillCounts, TokenDelta
from dynamo_lite.protocol.options import AdmissionOptions
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.admission import Admission
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.failover import FailoverClient, OnEnded
from dynamo_lite.routing.pickers import RoundRobin
from dynamo_lite.runtime.listening import bind
from dynamo_lite.serve.services.frontend.http import HttpServer, url_of
from dynamo_lite.vllm.frontend.intake import Intake
from dynamo_lite.vllm.frontend.openai_app import OpenAiApp, open_app
from dynamo_lite.vllm.http_options import HttpOptions
from dynamo_lite.vllm.wire import sampling_from_bytes
from tests.builders import endpoint_record

MAX_MODEL_LEN = 256
_SPECIAL = 256

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
    "temperature": 0,
}
TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "temperature": 0}


def write_model(directory: Path) -> Path:
    """A Llama configuration and a byte-level tokenizer with a chat template.

    Token ids 0..255 are GPT-2's byte alphabet in sorted order, then two special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", bos_token="<|begin|>"
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(directory)
    return directory


def flags(model: Path) -> list[str]:
    return [
        f"--model={model}",
        "--served-model-name=tiny",
        f"--max-model-len={MAX_MODEL_LEN}",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
    ]


class Workers:
    """A `RemoteGenerateClient` whose workers answer "abcd..." one token per step.

    refusals: lease id to what `submit` raises there. hold: no token after the
    first one, silent: none at all, until `release`. gate: the second token waits
    for it. script: the text instead. prompt_logprobs: told before
    the first token, each in a delta of its own.
    """

    def __init__(self, lease_ids: Sequence[int] = (1,)):
        self.members = [endpoint_record(lease_id) for lease_id in lease_ids]
        self.refusals: dict[int, Exception] = {}
        self.hold = self.silent = False
        self.gate: asyncio.Event | None = None
        self.script: bytes | None = None
        self.prompt_logprobs: list[LogprobRows] = []
        self.logprobs: Callable[[int], object] | None = None
        self.asked: list[tuple[int, GenerateRequest]] = []
        self.aborted: list[str] = []
        self.first_token = asyncio.Event()
        self._abort_seen = asyncio.Condition()
        self._released = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def connected(self, on_deltas: OnDeltas, on_lost: OnLost) -> Self:
        """The MakeTransport of the failover client."""
        self._on_deltas, self._on_lost = on_deltas, on_lost
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """`close` ends what runs."""

    def release(self) -> None:
        """Lets held requests continue."""
        self._released.set()

    def lose(self, request_ids: Sequence[str], why: str) -> None:
        """The connection that these ran on breaks."""
        for request_id in request_ids:
            if task := self._tasks.pop(request_id, None):
                task.cancel()
        self._on_lost(list(request_ids), why)

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        self.asked.append((member.lease_id, request))
        if member not in self.members:
            raise NoResponders("gone")
        if refusal := self.refusals.get(member.lease_id):
            raise refusal
        self._tasks[request.request_id] = asyncio.create_task(self._generate(request))

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if task := self._tasks.pop(request_id, None):
                task.cancel()
        async with self._abort_seen:
            self.aborted += request_ids
            self._abort_seen.notify_all()

    async def wait_aborted(self, count: int) -> None:
        async with asyncio.timeout(10), self._abort_seen:
            await self._abort_seen.wait_for(lambda: len(self.aborted) >= count)

    def retain(self, members) -> None:
        pass

    def is_connected(self, member: EndpointRecord) -> bool:
        return member in self.members

    def drop(self, member: EndpointRecord, why: str) -> None:
        pass

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _generate(self, request: GenerateRequest) -> None:
        params = sampling_from_bytes(request.sampling)
        count = params.max_tokens or 0
        text = self.script or bytes(97 + i % 26 for i in range(count))
        tokens = [byte_id(b) for b in text[:count]]
        if len(tokens) < count:
            tokens.append(_SPECIAL)  # an end of text, which no client sees
        if self.silent:
            await self._released.wait()
        for rows in self.prompt_logprobs:
            said = TokenDelta(request_id=request.request_id, token_ids=[], prompt_logprobs=rows)
            self._on_deltas([said])
        for i, token in enumerate(tokens[len(request.output_token_ids) :]):
            last = i == len(tokens) - 1 - len(request.output_token_ids)
            reason = ("stop" if token == _SPECIAL else "length") if last else None
            self._on_deltas(
                [
                    TokenDelta(
                        request_id=request.request_id,
                        token_ids=[token],
                        finish_reason=reason,
                        prefill=PrefillCounts(len(request.prompt_token_ids), 0, 0, 0.5, 0.25)
                        if i == 0
                        else None,
                        logprobs=self.logprobs(token) if self.logprobs else None,
                    )
                ]
            )
            self.first_token.set()
            if self.hold:
                await self._released.wait()
            if self.gate:
                await self.gate.wait()
            await asyncio.sleep(0)
        self._tasks.pop(request.request_id, None)


class Front:
    """The app over `workers`, and an HTTP client of it within the process."""

    def __init__(self, app: OpenAiApp, workers: Workers, intake: Intake):
        self.app, self.workers, self.intake = app, workers, intake
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app.asgi), base_url="http://app"
        )

    async def post(self, path: str, body: dict, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def idle(self) -> None:
        """Returns when no request is known any more."""
        async with asyncio.timeout(10):
            while self.app.client.get_num_unfinished_requests():
                await asyncio.sleep(0.01)
        assert self.app.client.engine_core._contexts == {}


@asynccontextmanager
async def open_front(
    model: Path,
    *extra: str,
    leases=(1,),
    limits: AdmissionOptions | None = None,
    client_priority: ClientPriority = "lower-only",
    max_body_bytes: int | None = None,
    **times: float,
) -> AsyncIterator[Front]:
    """times: `default_timeout_s` and `max_timeout_s` of the app."""
    workers = Workers(leases)
    async with AsyncExitStack() as stack:
        opened: list[Intake] = []

        async def open_intake(on_deltas: OnDeltas, on_ended: OnEnded) -> Intake:
            failover = await stack.enter_async_context(
                FailoverClient(
                    workers.connected,
                    picker=RoundRobin(),
                    on_deltas=on_deltas,
                    on_ended=on_ended,
                    move_wait_s=0.5,
                )
            )
            failover.set_members(workers.members)
            intake = Intake(
                failover,
                admission=Admission(limits),
                refused=Counter(),
                client_priority=client_priority,
            )
            opened.append(intake)
            return intake

        all_flags = [*flags(model), *extra]
        async with open_app(all_flags, open_intake, max_body_bytes=max_body_bytes, **times) as app:
            front = Front(app, workers, opened[0])
            try:
                yield front
            finally:
                await front.http.aclose()
                await workers.close()


@asynccontextmanager
async def listening(front: Front) -> AsyncIterator[tuple[HttpServer, str]]:
    """The Frontend's HTTP server over the app, and its URL."""
    sock = bind("127.0.0.1", 0)
    # Connections have it, too: what a client does not read stays in the server's own buffers.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    server = HttpServer(front.app.asgi, sock, HttpOptions(access_log=False))
    front.app.state.server = server
    await server.start()
    try:
        yield server, url_of(sock)
    finally:
        await server.stop(0.0)
        sock.close()


def events(body: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def byte_id(byte: int) -> int:
    """The token id of one printable ASCII byte."""
    return _BYTE_IDS[byte]


def _byte_ids() -> dict[int, int]:
    from tokenizers import pre_tokenizers

    ids = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return {b: ids[chr(b)] for b in range(33, 127)}


_BYTE_IDS = _byte_ids()

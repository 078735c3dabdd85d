"""What the tests of vLLM's front half need: a model directory without weights, and
workers that live in this process and answer with scripted tokens."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo_lite.engine.vllm.wire import sampling_from_bytes
from dynamo_lite.protocol.errors import NoResponders
from dynamo_lite.protocol.generate import GenerateRequest, PrefillCounts, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.runtime.generate import FailoverClient

MAX_MODEL_LEN = 256
_SPECIAL = 256

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


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


def member(lease_id: int) -> EndpointRecord:
    return EndpointRecord(
        component="VllmWorker",
        endpoint="generate",
        namespace="t",
        lease_id=lease_id,
        transport=EndpointTransport(nats_tcp=f"worker-{lease_id}"),
    )


class Workers:
    """A `GenerateClient` whose workers answer "abcd..." one token per step.

    refusals: lease id to what `submit` raises there. hold: no token after the
    first one. gate: the second token waits for it. script: the text instead.
    """

    def __init__(self, lease_ids: Sequence[int] = (1,)):
        self.members = [member(lease_id) for lease_id in lease_ids]
        self.refusals: dict[int, Exception] = {}
        self.hold = False
        self.gate: asyncio.Event | None = None
        self.script: bytes | None = None
        self.logprobs: Callable[[int], object] | None = None
        self.asked: list[tuple[int, GenerateRequest]] = []
        self.aborted: list[str] = []
        self.first_token = asyncio.Event()
        self._failover: FailoverClient | None = None
        self._abort_seen = asyncio.Condition()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def connect(self, failover: FailoverClient) -> None:
        self._failover = failover
        failover.connect(self)

    def lose(self, request_ids: Sequence[str], why: str) -> None:
        """The connection that these ran on breaks."""
        for request_id in request_ids:
            if task := self._tasks.pop(request_id, None):
                task.cancel()
        assert self._failover is not None
        self._failover.take_lost(request_ids, why)

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

    def drop(self, member: EndpointRecord, why: str) -> None:
        pass

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _generate(self, request: GenerateRequest) -> None:
        assert self._failover is not None
        params = sampling_from_bytes(request.sampling)
        count = params.max_tokens or 0
        text = self.script or bytes(97 + i % 26 for i in range(count))
        tokens = [byte_id(b) for b in text[:count]]
        if len(tokens) < count:
            tokens.append(_SPECIAL)  # an end of text, which no client sees
        for i, token in enumerate(tokens[len(request.output_token_ids) :]):
            last = i == len(tokens) - 1 - len(request.output_token_ids)
            reason = ("stop" if token == _SPECIAL else "length") if last else None
            self._failover.take_deltas(
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
                await asyncio.Event().wait()
            if self.gate:
                await self.gate.wait()
            await asyncio.sleep(0)
        self._tasks.pop(request.request_id, None)


def byte_id(byte: int) -> int:
    """The token id of one printable ASCII byte."""
    return _BYTE_IDS[byte]


def _byte_ids() -> dict[int, int]:
    from tokenizers import pre_tokenizers

    ids = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return {b: ids[chr(b)] for b in range(33, 127)}


_BYTE_IDS = _byte_ids()

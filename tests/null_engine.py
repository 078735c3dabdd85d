"""An engine that computes nothing, for measuring the runtime around it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from dynamo_lite.disagg.engine import EngineLoad
from dynamo_lite.protocol.errors import Refused, Unavailable
from dynamo_lite.protocol.generate import GenerateRequest, PrefillCounts, TokenDelta
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.protocol.prefill import FirstToken
from dynamo_lite.protocol.records import EngineMetadata


class _Sampling(msgspec.Struct):
    """The only sampling parameter that is read here."""

    max_tokens: int | None = None


#: Of an answer to a request without a limit.
_MAX_TOKENS = 64

_decode_sampling = msgspec.msgpack.Decoder(_Sampling).decode


@dataclass(slots=True)
class _Run:
    """A running request."""

    prompt: list[int]
    #: Position of the next token in the answer.
    position: int
    #: Tokens still to come.
    left: int


class NullEngine:
    """DecodeEngine that gives each running request a token in every step.

    A request ends with finish_reason "length". token_at: the token at a position of the answer to a
    prompt, for tests that must tell positions apart; otherwise every token is `token_id`.
    """

    def __init__(
        self,
        *,
        token_id: int = 1,
        token_at: Callable[[list[int], int], int] | None = None,
    ):
        self._token_id, self._token_at = token_id, token_at
        self._running: dict[str, _Run] = {}
        self._started: dict[str, PrefillCounts] = {}  # not sent yet
        self._wake = asyncio.Event()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._wake.set()

    @property
    def model(self) -> str:
        return "null"

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._running), gave_tokens=True, max_running=6)

    @property
    def metadata(self) -> Sequence[EngineMetadata]:
        return ()

    @property
    def kv_events(self) -> None:
        return None

    async def describe(self) -> EngineStatus:
        raise Unavailable("a null engine has no process of its own")

    def first_token(self, first: FirstToken) -> TokenDelta | None:
        """A null engine asks no prefill worker."""
        return None

    async def submit(self, request: GenerateRequest) -> None:
        try:
            max_tokens = _decode_sampling(request.sampling).max_tokens
        except msgspec.DecodeError as exc:
            raise Refused(f"malformed sampling parameters: {exc}", elsewhere=False) from exc
        if max_tokens is None:
            max_tokens = _MAX_TOKENS
        if max_tokens < 1:
            raise Refused(f"max_tokens must be at least 1, got {max_tokens}", elsewhere=False)
        if request.request_id in self._running:
            raise Refused(f"request {request.request_id} is already running", elsewhere=False)
        done = len(request.output_token_ids)
        prompt = request.prompt_token_ids
        self._running[request.request_id] = _Run(prompt, done, max(max_tokens - done, 0))
        self._started[request.request_id] = PrefillCounts(len(prompt) + done, 0, 0)
        self._wake.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)
            self._started.pop(request_id, None)

    async def steps(self) -> AsyncIterator[list[TokenDelta]]:
        while not self._closed:
            if self._running:
                yield self._step()
                await asyncio.sleep(0)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _step(self) -> list[TokenDelta]:
        started, self._started = self._started, {}
        deltas: list[TokenDelta] = []
        for request_id, run in list(self._running.items()):
            token_ids = [self._token(run)] if run.left else []
            run.position += len(token_ids)
            run.left -= len(token_ids)
            if not run.left:
                del self._running[request_id]
            deltas.append(
                TokenDelta(
                    request_id=request_id,
                    token_ids=token_ids,
                    finish_reason=None if run.left else "length",
                    prefill=started.get(request_id),
                )
            )
        return deltas

    def _token(self, run: _Run) -> int:
        if self._token_at is None:
            return self._token_id
        return self._token_at(run.prompt, run.position)

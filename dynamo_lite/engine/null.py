"""An engine that computes nothing, for measuring the runtime around it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Self

import msgspec

from dynamo_lite.engine.base import EngineLoad
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import GenerateRequest, PrefillCounts, TokenDelta
from dynamo_lite.protocol.records import EngineMetadata


class _Sampling(msgspec.Struct):
    """The one sampling parameter that matters here; others are ignored."""

    max_tokens: int | None = None


_decode_sampling = msgspec.msgpack.Decoder(_Sampling).decode


class NullEngine:
    """DecodeEngine whose every step gives each running request the same tokens.

    max_tokens: length of an answer whose request names none. A request ends
    with finish_reason "length"; a step that ends it may be shorter than
    `tokens_per_step`.
    """

    def __init__(self, *, token_id: int = 1, tokens_per_step: int = 1, max_tokens: int = 64):
        self._step_token_ids = [token_id] * tokens_per_step
        self._max_tokens = max_tokens
        self._running: dict[str, int] = {}  # tokens still to come
        self._started: dict[str, TokenDelta] = {}  # first deltas not given out yet
        self._wake = asyncio.Event()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._wake.set()

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._running))

    @property
    def metadata(self) -> EngineMetadata | None:
        return None

    async def submit(self, request: GenerateRequest) -> None:
        try:
            max_tokens = _decode_sampling(request.sampling).max_tokens
        except msgspec.DecodeError as exc:
            raise Refused(f"malformed sampling parameters: {exc}", elsewhere=False) from exc
        if max_tokens is None:
            max_tokens = self._max_tokens
        if max_tokens < 1:
            raise Refused(f"max_tokens must be at least 1, got {max_tokens}", elsewhere=False)
        if request.request_id in self._running:
            raise Refused(f"request {request.request_id} runs already", elsewhere=False)
        self._running[request.request_id] = max_tokens
        self._started[request.request_id] = self._delta(
            request.request_id, max_tokens, PrefillCounts(len(request.prompt_token_ids), 0, 0)
        )
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
        deltas = [
            started.get(request_id) or self._delta(request_id, left, None)
            for request_id, left in self._running.items()
        ]
        produced = len(self._step_token_ids)
        self._running = {i: left - produced for i, left in self._running.items() if left > produced}
        return deltas

    def _delta(self, request_id: str, left: int, prefill: PrefillCounts | None) -> TokenDelta:
        return TokenDelta(
            request_id=request_id,
            token_ids=self._step_token_ids[:left],
            finish_reason="length" if left <= len(self._step_token_ids) else None,
            prefill=prefill,
        )

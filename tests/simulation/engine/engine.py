"""A simulated engine as its component sees it: the other end of a pipe.

Implements DecodeEngine and PrefillEngine. The engine itself is a process of its
own, which can be stopped, killed or slow while its component works.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.counters import BROKEN_LINK, ENDED
from dynamo_lite.disagg.engine import AttemptOutcome, EngineLoad, OnBrokenLink, OnFirstToken
from dynamo_lite.disagg.prefill.open_attempts import OpenAttempts
from dynamo_lite.disagg.request_ids import RequestIds
from dynamo_lite.disagg.transfer_params import (
    PrefillJobParams,
    decode_params,
    pack,
    with_first_token,
)
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import (
    EngineDied,
    IncompatiblePeer,
    NoResponders,
    Refused,
    StartupError,
)
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.health import EngineStatus, decode_engine_status
from dynamo_lite.protocol.prefill import FirstToken, RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.runtime.messaging import Messaging
from tests.simulation.engine.assembly import EngineSetup, Outputs, SimEngineProcess
from tests.simulation.engine.model import VOCABULARY, Sampling, SimRequest, decode_sampling
from tests.simulation.shipped import Shipped

_START_S = 15.0
_STOP_S = 5.0
_DESCRIBE_S = 5.0


class SimEngine:
    """start_engine: runs a main function as a process of its own, and returns that; calls `on_end`
    in the caller's process when it has ended, however it did. on_counts: takes what the halves have
    counted."""

    def __init__(
        self,
        setup: EngineSetup,
        *,
        start_engine: Callable[
            [SimEngineProcess, Coroutine[Any, Any, None], Callable[[], None]], Any
        ],
        shipped: Shipped,
        messaging: Messaging,
        on_counts: Callable[[dict[str, Any]], None],
    ):
        self._setup, self._start_engine, self._shipped = setup, start_engine, shipped
        self._messaging, self._on_counts = messaging, on_counts
        self._engine: SimEngineProcess | None = None
        self._process: Any = None
        self._ready, self._ended = asyncio.Event(), asyncio.Event()
        self._outputs: asyncio.Queue[Outputs | None] = asyncio.Queue()
        self._attempts = OpenAttempts()
        self._first_tokens = shipped.first_tokens(CollectorRegistry(), setup.clock)
        self._ids = RequestIds()
        self._on_broken_link: OnBrokenLink = lambda engine_id, why: None
        self._closing = False
        self.load = EngineLoad()
        self.metadata: Sequence[EngineMetadata] = ()

    @property
    def model(self) -> str:
        return self._setup.config.model

    async def __aenter__(self) -> Self:
        self._engine = engine = SimEngineProcess(
            self._shipped, self._setup, self._outputs.put_nowait
        )
        self._process = self._start_engine(engine, engine.main(self._ready.set), self._on_end)
        try:
            await self._wait_ready()
            self.metadata = [(await self.describe()).metadata]
        except BaseException:
            self._process.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._engine is not None and self._process is not None
        self._closing = True
        self._attempts.cancel()
        self._engine.stop()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _STOP_S)
        self._process.kill()

    @property
    def kv_events(self) -> None:
        """There is no routing by prefixes in a simulation."""
        return None

    async def describe(self) -> EngineStatus:
        subject = names.describe_subject(
            self._setup.engine_config.namespace, self._setup.engine_config.engine_id
        )
        try:
            reply = await self._messaging.request(subject, b"", timeout_s=_DESCRIBE_S)
        except NoResponders as exc:
            raise StartupError("the engine's process does not answer on NATS") from exc
        return decode_engine_status(reply)

    async def submit(self, request: GenerateRequest) -> None:
        sampling = decode_sampling(request.sampling)
        done = request.output_token_ids
        prompt = [*request.prompt_token_ids, *done]
        self._check_prompt(prompt)
        left = sampling.max_tokens - len(done)
        own = self._ids.enter(request.request_id)
        if left <= 0:
            # Another worker has generated its last token, and the message of its end was lost.
            delta = TokenDelta(request_id=own, token_ids=[], finish_reason="length")
            self._outputs.put_nowait(Outputs(deltas=[delta], load=self.load))
            return
        max_tokens = min(left, self._setup.config.max_model_len - len(prompt))
        transfer = decode_params(request.timeout_s, self._setup.clock.monotonic())
        if max_tokens > 1 and sampling.greedy:
            self._first_tokens.expect(own, request, frozenset())
            transfer = with_first_token(transfer)
        self._add(own, request, prompt, sampling, max_tokens, transfer)

    async def abort(self, request_ids: Sequence[str]) -> None:
        if self._engine is not None:
            left = self._ids.leave(request_ids)
            for own in left:
                self._first_tokens.forget(own)
            self._engine.abort(left)

    def first_token(self, first: FirstToken) -> TokenDelta | None:
        caller = self._ids.running(first.request_id)
        fits = {"vocabulary": VOCABULARY, "block_size": 0}
        delta = self._first_tokens.take(first, caller=caller, **fits)
        self._on_counts({"first tokens late" if delta is None else "first tokens sent": 1})
        return delta

    async def steps(self) -> AsyncIterator[list[TokenDelta]]:
        while (outputs := await self._next()) is not None:
            deltas = [mine for delta in outputs.deltas if (mine := self._named(delta))]
            if deltas:
                yield deltas

    async def run_prefills(self, on_broken_link: OnBrokenLink) -> None:
        self._on_broken_link = on_broken_link
        try:
            while await self._next() is not None:
                pass
        finally:
            # A dead process starts no write: its attempts end now.
            self._attempts.cancel()

    async def prefill(
        self,
        job: RemotePrefillRequest,
        target: EngineMetadata,
        cell: Cell,
        on_first_token: OnFirstToken,
    ) -> AttemptOutcome:
        prompt, wanted, sampling = job.prompt_token_ids, job.first_token, Sampling(max_tokens=1)
        if wanted is not None:
            prompt = [*prompt, wanted.last_token_id]
        self._check_prompt(prompt)
        transfer = pack(PrefillJobParams.of(job, target, cell))

        async def added() -> None:
            self._add(job.attempt, job, prompt, sampling, 1, transfer)

        sampled = None if wanted is None else on_first_token
        return await self._attempts.run(job.attempt, added(), sampled)

    @property
    def busy(self) -> bool:
        return len(self._attempts) > 0

    def check_peer(self, target: EngineMetadata) -> bool:
        if target.fingerprint != self.metadata[0].fingerprint:
            raise IncompatiblePeer(target.engine_id, "another model")
        return True

    async def abandon(self, attempt: str) -> None:
        if self._engine is not None:
            self._engine.abort([attempt])

    def _named(self, delta: TokenDelta) -> TokenDelta | None:
        """The delta as its caller knows it; None when that has aborted the request."""
        own = delta.request_id
        if (caller := self._ids.running(own)) is None:
            return None
        if delta.finish_reason is not None:
            self._ids.leave([caller])
        left = self._first_tokens.settle(own, msgspec.structs.replace(delta, request_id=caller))
        # The simulated engines compute the same tokens.
        assert not isinstance(left, GenerateRequest)
        return left

    async def _wait_ready(self) -> None:
        waits = [asyncio.ensure_future(e.wait()) for e in (self._ready, self._ended)]
        try:
            await asyncio.wait(waits, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self._ready.is_set():
            raise StartupError("the engine did not start")

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        longest = self._setup.config.max_model_len - 1
        if not 1 <= len(prompt) <= longest:
            raise Refused(
                f"prompt of {len(prompt)} tokens; this model takes 1 to {longest}", elsewhere=False
            )

    def _add(
        self,
        request_id: str,
        asked: GenerateRequest | RemotePrefillRequest,
        prompt: list[int],
        sampling: Sampling,
        max_tokens: int,
        transfer: dict[str, Any] | None,
    ) -> None:
        if self._ended.is_set() or self._engine is None:
            raise Refused("the engine's process is gone", elsewhere=True)
        request = SimRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            arrived=self._setup.clock.monotonic(),
            block_size=self._setup.config.block_size,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            kv_transfer_params=transfer,
        )
        self._engine.add(request)

    async def _next(self) -> Outputs | None:
        """One step's outputs; None once the engine is being closed."""
        outputs = await self._outputs.get()
        if outputs is None:
            if self._closing:
                return None
            raise EngineDied("the engine's process ended")
        self.load = outputs.load
        for delta in outputs.deltas if self._attempts else ():
            self._attempts.sampled(delta.request_id, delta.token_ids)
        if outputs.counts:
            for engine_id, why in outputs.counts.get(BROKEN_LINK, ()):
                self._on_broken_link(engine_id, why)
            self._attempts.apply({ENDED: outputs.counts.get(ENDED, ())})
            self._on_counts(outputs.counts)
        return outputs

    def _on_end(self) -> None:
        self._ended.set()
        self._outputs.put_nowait(None)

"""Stock vLLM behind the engine seam.

The component's process holds vLLM's engine-core client, and nothing of vLLM's front half:
prompts come as token ids, and outputs leave as the engine produced them, one batch per step.
Detokenisation happens in the Frontend.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from dynamo_lite.disagg.counters import PREFLIGHT, SPAN
from dynamo_lite.disagg.decode.first_tokens import FirstTokens
from dynamo_lite.disagg.engine_config import EngineConfig, write_engine_config
from dynamo_lite.disagg.metrics import RemotePrefillMetrics
from dynamo_lite.disagg.prefill.link_test_client import LinkTestClient
from dynamo_lite.disagg.prefill.open_attempts import OpenAttempts
from dynamo_lite.engine.base import AttemptOutcome, EngineLoad, LinkReport, OnFirstToken
from dynamo_lite.engine.request_ids import RequestIds
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import (
    EngineDied,
    NoResponders,
    ProtocolError,
    Refused,
    StartupError,
    Unavailable,
)
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.prefill import (
    EngineStatus,
    FirstToken,
    Listen,
    RemotePrefillRequest,
    decode_engine_status,
)
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.permits import Permit
from dynamo_lite.runtime.tracing.tracer import Tracer, record_notes
from dynamo_lite.vllm import requests
from dynamo_lite.vllm.engine.connector_types import KV_LAYOUT
from dynamo_lite.vllm.engine.engine_config import vllm_config
from dynamo_lite.vllm.engine.fingerprint import check_peer, fingerprint
from dynamo_lite.vllm.engine.kv_events import VllmKvEvents
from dynamo_lite.vllm.engine.supported import refusal_reported
from dynamo_lite.vllm.first_token import FirstTokenRules, stop_tokens
from dynamo_lite.vllm.wire import delta_from_output

logger = logging.getLogger(__name__)

_DESCRIBE_S = 5.0


class VllmEngine:
    """A decode or prefill engine, depending on the role in its engine config.

    engine_args: flags of `vllm serve`. engine_config: None for an engine without
    remote prefills. engine_config_path: its file, for the engine's processes.
    tells_kv: whether it publishes KV events. first_tokens: whether a decode engine takes first
    tokens from prefill workers. tracer: records the spans that its processes note.
    """

    def __init__(
        self,
        engine_args: list[str],
        *,
        engine_config: EngineConfig | None,
        engine_config_path: Path,
        messaging: Messaging,
        registry: CollectorRegistry,
        on_drop: OnDrop = uncounted,
        tells_kv: bool = False,
        first_tokens: bool = False,
        tracer: Tracer | None = None,
    ):
        self._args = engine_args
        self._engine_config, self._engine_config_path = engine_config, engine_config_path
        self._messaging, self._on_drop = messaging, on_drop
        self._metrics, self._tracer = RemotePrefillMetrics(registry, on_drop), tracer
        self._client: Any = None
        self._config: VllmConfig | None = None
        self._rules: FirstTokenRules | None = None
        self._first_tokens = FirstTokens(registry) if first_tokens else None
        self._loaded_len: int | None = None
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="engine-start")
        self._attempts = OpenAttempts()
        #: Decode engines that have left; sent to the engine with the next job.
        self._left: list[str] = []
        #: Compatible decode engines, and whether their blocks can also be read.
        self._checked: dict[str, tuple[EngineMetadata, bool]] = {}
        self._ids = RequestIds()
        self._preflights = (
            None if engine_config is None else LinkTestClient(engine_config, messaging, self._wake)
        )
        self.load = EngineLoad()
        self.metadata: EngineMetadata | None = None
        self.kv_events = VllmKvEvents(on_drop) if tells_kv else None

    async def __aenter__(self) -> Self:
        if self._engine_config is not None:
            write_engine_config(self._engine_config_path, self._engine_config)
        loop = asyncio.get_running_loop()
        try:
            # In a thread: loading takes many seconds, and the event loop must go on.
            self._client = await loop.run_in_executor(self._starter, self._load)
            if self._engine_config is not None:
                described = (await self.describe()).metadata
                self.metadata = await loop.run_in_executor(
                    self._starter, self._fingerprinted, described
                )
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def config(self) -> VllmConfig:
        assert self._config is not None
        return self._config

    @property
    def model(self) -> str:
        return self.config.model_config.model

    async def describe(self) -> EngineStatus:
        """Requests the status of the engine's process over NATS.

        Raises Unavailable, DeadlineExceeded, ProtocolError, StartupError.
        """
        config = self._engine_config
        assert config is not None
        subject = names.describe_subject(config.namespace, config.engine_id)
        try:
            reply = await self._messaging.request(subject, b"", timeout_s=_DESCRIBE_S)
        except NoResponders as exc:
            raise StartupError("the engine's process does not answer on NATS") from exc
        try:
            return decode_engine_status(reply)
        except ProtocolError:
            self._on_drop("describe_reply")
            raise

    async def submit(self, request: GenerateRequest) -> None:
        """Raises Refused if this engine cannot take the request. If it is cancelled, the caller
        must abort the request."""
        timed = self._engine_config is not None
        made = requests.generation(request, self.config.model_config, timed=timed)
        made.request_id = self._ids.enter(request.request_id)
        if self._first_tokens is not None:
            self._expect_first_token(self._first_tokens, request, made)
        try:
            await self._add(made)
        except Exception:
            self._leave([request.request_id])
            raise
        # After a cancel the engine's process may have the request: `abort` needs its name there.

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._abort(self._leave(request_ids))

    def first_token(self, first: FirstToken) -> TokenDelta | None:
        if self._first_tokens is None:
            raise ProtocolError(f"first token of {first.request_id}, which did not ask for it")
        return self._first_tokens.take(
            first,
            caller=self._ids.running(first.request_id),
            vocabulary=self.config.model_config.get_vocab_size(),
        )

    async def steps(self) -> AsyncIterator[list[TokenDelta]]:
        """Ends when the engine is closed. Raises EngineDied if its process ended by itself."""
        while (outputs := await self._next()) is not None:
            if outputs.outputs:
                deltas, instead = self._deltas(outputs)
                for request in instead:
                    deltas += await self._go_on(request)
                yield deltas

    async def run_prefills(self) -> None:
        """Reads the engine's outputs for `prefill`. Raises EngineDied."""
        try:
            while await self._next() is not None:
                pass
        except EngineDied as exc:
            self._attempts.died(str(exc))
            raise

    async def prefill(
        self,
        job: RemotePrefillRequest,
        target: EngineMetadata,
        permit: Permit,
        on_first_token: OnFirstToken,
    ) -> AttemptOutcome:
        """Runs one attempt; `run_prefills` must be running.

        Raises Refused for a prompt that this engine cannot take, IncompatiblePeer for a target
        that it cannot write to.
        """
        assert self.metadata is not None
        known = self._checked.get(target.engine_id)
        if known is None or known[0] is not target:
            known = self._checked[target.engine_id] = target, check_peer(self.metadata, target)
        if not known[1]:
            # Its blocks differ: they are converted when they are written, and cannot be read.
            job = msgspec.structs.replace(job, prefix_block_ids=[])
        left, self._left = self._left, []
        sampled = self._samples(job)
        model = self.config.model_config
        request = requests.prefill(job, target, left, permit, model, first_token=sampled)
        with self._attempts.open(job.attempt) as attempt:
            await self._add(request)
            if sampled and (token := await attempt.first_token()) is not None:
                await on_first_token(token)
            return await attempt.ended

    async def preflight(self, target: EngineMetadata) -> LinkReport:
        assert self.metadata is not None and self._preflights is not None
        check_peer(self.metadata, target)
        return await self._preflights.test(target)

    async def listen(self, listen: Listen) -> None:
        assert self._preflights is not None
        await self._preflights.listen(listen)

    async def abandon(self, attempt: str) -> None:
        await self._abort([attempt])

    def forget(self, engine_ids: Sequence[str]) -> None:
        """These decode engines have left; the next job passes them to the engine's processes."""
        self._left += engine_ids
        for engine_id in engine_ids:
            self._checked.pop(engine_id, None)

    async def _wake(self) -> None:
        """Any call makes an idle engine core check for steps to make."""
        try:
            if self._client is not None:
                await self._client.is_sleeping_async()
        except EngineDeadError as exc:
            raise Unavailable("the engine's process has ended") from exc

    async def _abort(self, own_ids: list[str]) -> None:
        if self._client is not None and own_ids:
            await self._client.abort_requests_async(own_ids)

    def _samples(self, job: RemotePrefillRequest) -> bool:
        """Whether this prefill engine samples the first token that the job asks for."""
        wanted = job.first_token
        if wanted is None or self._rules is None:
            return False
        return self._rules.samples(wanted.sampling, len(job.prompt_token_ids) + 1)

    def _expect_first_token(
        self, first_tokens: FirstTokens, request: GenerateRequest, made: EngineCoreRequest
    ) -> None:
        """made: the engine's request."""
        assert self._rules is not None and made.sampling_params is not None
        params = made.sampling_params
        sampling = self._rules.sampling(params, len(made.prompt_token_ids or ()))
        if sampling is not None:
            first_tokens.expect(made.request_id, request, stop_tokens(params))
            requests.ask_first_token(made, sampling)

    def _leave(self, request_ids: Sequence[str]) -> list[str]:
        """Forgets requests. Returns the engine's names of those that ran."""
        left = self._ids.leave(request_ids)
        if self._first_tokens is not None:
            for own in left:
                self._first_tokens.forget(own)
        return left

    async def _go_on(self, request: GenerateRequest) -> list[TokenDelta]:
        """Submits a request again that goes on from the first token that the client has.

        Returns the end of the answer if that is not possible.
        """
        assert self._first_tokens is not None
        caller = request.request_id
        before = self._ids.leave([caller])
        if not before:
            return []  # aborted meanwhile
        own = self._ids.enter(caller)
        self._first_tokens.go_on(own, request)
        await self._abort(before)
        try:
            timed = self._engine_config is not None
            made = requests.generation(request, self.config.model_config, timed=timed)
            made.request_id = own
            if self._ids.running(own) is not None:
                await self._add(made)
        except Refused as exc:
            logger.error("request %s: cannot go on from its first token: %s", caller, exc)
            self._leave([caller])
            return [TokenDelta(request_id=caller, token_ids=[], finish_reason="error")]
        if self._ids.running(own) is None:  # aborted, perhaps before the engine had it
            await self._abort([own])
        return []

    def _deltas(self, outputs: EngineCoreOutputs) -> tuple[list[TokenDelta], list[GenerateRequest]]:
        """The deltas of one step, for requests that still run; and requests to be submitted in
        place of those with their ids, see `FirstTokens.settle`."""
        deltas: list[TokenDelta] = []
        instead: list[GenerateRequest] = []
        for output in outputs.outputs:
            own = output.request_id
            if (caller := self._ids.running(own)) is None:
                continue
            output.request_id = caller
            left = delta = delta_from_output(output, outputs.timestamp)
            if delta.prefill is not None:
                self._metrics.first_token(delta.prefill)
            if self._first_tokens is not None:
                left = self._first_tokens.settle(own, delta)
            if isinstance(left, GenerateRequest):
                instead.append(left)
                continue
            if delta.finish_reason is not None:
                self._ids.leave([caller])
            if left is not None:
                deltas.append(left)
        return deltas, instead

    async def _add(self, request: EngineCoreRequest) -> None:
        try:
            await self._client.add_request_async(request)
        except EngineDeadError as exc:
            raise Refused("the engine's process has ended", elsewhere=True) from exc

    async def _next(self) -> EngineCoreOutputs | None:
        """Waits for one step's outputs; None if the engine is being closed."""
        if self._client is None:
            return None
        try:
            outputs: EngineCoreOutputs = await self._client.get_output_async()
        except EngineDeadError as exc:
            if self._client is None:
                return None
            raise EngineDied(str(exc)) from exc
        # Before the outcomes of attempts, which come with the statistics.
        for output in outputs.outputs if self._attempts else ():
            self._attempts.sampled(output.request_id, output.new_token_ids)
        if (stats := outputs.scheduler_stats) is not None:
            self.load = EngineLoad(
                running=stats.num_running_reqs,
                # vLLM has a separate count of requests that its last step could not schedule.
                waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
                kv_usage=stats.kv_cache_usage,
                gave_tokens=self.load.gave_tokens
                or any(output.new_token_ids for output in outputs.outputs),
            )
            if stats.kv_connector_stats:
                self._apply_counts(stats.kv_connector_stats)
        return outputs

    def _apply_counts(self, counts: dict[str, Any]) -> None:
        """counts: the counters of the connector's halves, of one step."""
        self._metrics.apply(counts)
        if self._tracer is not None:
            record_notes(self._tracer, counts.get(SPAN, ()))
        self._attempts.apply(counts)
        if self._preflights is not None:
            self._preflights.resolve(counts.get(PREFLIGHT, ()))

    def _load(self) -> Any:
        self._config = config = vllm_config(
            self._args, self._engine_config, self._engine_config_path, self.kv_events
        )
        if self.kv_events is not None and not self.kv_events.attach(config):
            self.kv_events = None
        self._loaded_len = config.model_config.max_model_len
        self._rules = FirstTokenRules(config)
        with refusal_reported(self._engine_config_path):
            return EngineCoreClient.make_async_mp_client(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=True,
            )

    def _fingerprinted(self, described: EngineMetadata) -> EngineMetadata:
        """Adds the fingerprint; the engine's process has only set its layout."""
        layout = described.fingerprint[KV_LAYOUT]
        made = fingerprint(self.config, layout, max_model_len=self._loaded_len)
        return msgspec.structs.replace(described, fingerprint=made)

    async def _close(self) -> None:
        self._attempts.cancel()
        if self._preflights is not None:
            self._preflights.close()
        if self._client is not None:
            loop = asyncio.get_running_loop()
            client, self._client = self._client, None
            await loop.run_in_executor(self._starter, client.shutdown)
        self._starter.shutdown(wait=False)
        with contextlib.suppress(FileNotFoundError):
            self._engine_config_path.unlink()

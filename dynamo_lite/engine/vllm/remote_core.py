"""vLLM's engine-core client, where the engine core is whichever worker is picked.

Owns the choice of a worker per request, the retry on another one while nothing
has been accepted, and the order in which deltas and losses reach vLLM's output
processor. Everything that only makes sense next to an engine (sleep, profile,
LoRA, weights) stays vLLM's NotImplementedError, which its app answers with 501.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

from dynamo_lite.engine.vllm.wire import output_from_delta, sampling_to_bytes
from dynamo_lite.policy.routing import Picker
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    ProtocolError,
    Refused,
    Unavailable,
)
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.generate import GenerateClient

logger = logging.getLogger(__name__)

_MAX_REQUEST_ID = 256


@dataclass(frozen=True)
class _Lost:
    request_ids: list[str]
    why: str


def unavailable(message: str) -> GracefulHTTPError:
    """The 503 that vLLM's app sends as it is."""
    return GracefulHTTPError(message, HTTPStatus.SERVICE_UNAVAILABLE)


class RemoteCore(EngineCoreClient):
    """members: the live workers.

    `on_deltas` and `on_lost` are the transport's callbacks; `connect` must be
    called before the first request. `fail` is set by the engine client: it ends
    one request with an error and returns the other sequences that die with it.
    """

    def __init__(self, *, members: Callable[[], Sequence[EndpointRecord]], picker: Picker):
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.fail: Callable[[str, Exception], list[str]] = lambda request_id, error: []
        self._members = members
        self._picker = picker
        self._transport: GenerateClient | None = None
        self._received: asyncio.Queue[list[TokenDelta] | _Lost] = asyncio.Queue()

    def connect(self, transport: GenerateClient) -> None:
        self._transport = transport

    def on_deltas(self, deltas: list[TokenDelta]) -> None:
        self._received.put_nowait(deltas)

    def on_lost(self, request_ids: Sequence[str], why: str) -> None:
        self._received.put_nowait(_Lost(list(request_ids), why))

    @property
    def transport(self) -> GenerateClient:
        assert self._transport is not None, "connect() comes first"
        return self._transport

    def check_members(self) -> None:
        """Raises the 503 when there is nobody to ask."""
        if not self._members():
            raise unavailable("No worker is available. Please try again later.")

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Returns when a worker has the request.

        Raises VLLMValidationError (400) for what cannot travel or is refused for
        good, GracefulHTTPError (503) when no worker takes it.
        """
        if request.abort_immediately:
            return  # releases blocks of vLLM's own KV transfer, which is not used here
        try:
            await self._submit(self._message(request))
        except Refused as exc:
            raise VLLMValidationError(exc.reason) from exc
        except (Unavailable, DeadlineExceeded) as exc:
            raise unavailable(f"No worker took the request: {exc}") from exc

    async def _submit(self, message: GenerateRequest) -> None:
        """Asks each live worker at most once; raises what the last one said."""
        tried: set[int] = set()
        failure: Exception | None = None
        while True:
            candidates = [m for m in self._members() if m.lease_id not in tried]
            if not candidates and failure is not None:
                raise failure
            # Nobody at all is the picker's NoWorkers.
            picked = self._picker.pick(candidates)
            tried.add(picked.member.lease_id)
            try:
                await self.transport.submit(picked.member, message)
            except BrokerUnavailable:
                raise  # the same for every worker
            except (Unavailable, DeadlineExceeded) as exc:
                failure = exc
            except Refused as exc:
                if not exc.elsewhere:
                    raise
                failure = Unavailable(exc.reason)
            else:
                return
            logger.info(
                "worker %x (%s) did not take %s: %s",
                picked.member.lease_id,
                picked.reason,
                message.request_id,
                failure,
            )

    def _message(self, request: EngineCoreRequest) -> GenerateRequest:
        params = request.sampling_params
        if params is None or request.pooling_params is not None:
            raise VLLMValidationError("Only text generation is served here")
        if request.mm_features or request.prompt_embeds is not None:
            raise VLLMValidationError("Multimodal inputs and prompt embeddings are not served here")
        if request.lora_request is not None:
            raise VLLMValidationError("LoRA adapters are not served here")
        if request.resumable:
            raise VLLMValidationError("Streamed prompts are not served here")
        if len(request.request_id) > _MAX_REQUEST_ID:
            raise VLLMValidationError(
                f"The request id may have at most {_MAX_REQUEST_ID} characters",
                parameter="request_id",
            )
        try:
            sampling = sampling_to_bytes(params)
        except ProtocolError as exc:
            raise VLLMValidationError(f"Not served here: {exc}") from exc
        return GenerateRequest(
            request_id=request.request_id,
            client_id="",  # the transport's to fill in
            prompt_token_ids=request.prompt_token_ids or [],
            sampling=sampling,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            trace_headers=dict(request.trace_headers) if request.trace_headers else None,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
        )

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            await self.transport.abort(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """One engine step of one worker."""
        while True:
            received = await self._received.get()
            if isinstance(received, _Lost):
                await self._report_lost(received)
                continue
            now = time.monotonic()
            outputs = [self._output(delta, now) for delta in received]
            return EngineCoreOutputs(outputs=outputs, timestamp=now)

    def _output(self, delta: TokenDelta, now: float) -> EngineCoreOutput:
        try:
            return output_from_delta(delta, now)
        except ProtocolError as exc:
            logger.error("request %s: %s", delta.request_id, exc)
            return EngineCoreOutput(
                request_id=delta.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR
            )

    async def _report_lost(self, lost: _Lost) -> None:
        error = unavailable(f"The worker that ran this request is gone: {lost.why}")
        orphans: list[str] = []
        for request_id in lost.request_ids:
            orphans += self.fail(request_id, error)
        await self.abort_requests_async(orphans)

    def shutdown(self, timeout: float | None = None) -> None:
        """The transport belongs to the component."""

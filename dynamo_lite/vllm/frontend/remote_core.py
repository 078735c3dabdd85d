"""vLLM's engine-core client; the workers of this Frontend take the place of the engine core.

It checks admission, converts vLLM's requests to messages, and passes deltas and ends to
vLLM's output processor in order. The failover client chooses workers and migrates requests.
What only an engine can do (sleep, profile, LoRA, weights) stays vLLM's NotImplementedError,
which its app answers with 501.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

from vllm.exceptions import VLLMError
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

from dynamo_lite.policy.admission import Admission, Busy
from dynamo_lite.policy.lanes import ClientPriority, granted_priority
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    NoWorkers,
    Overloaded,
    ProtocolError,
    Refused,
)
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.trace import TraceContext
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.runtime.tracing.tracer import Tracer
from dynamo_lite.vllm.frontend.edge import current_context, http_error
from dynamo_lite.vllm.frontend.request_trace import RequestTraces
from dynamo_lite.vllm.requests import generate_request
from dynamo_lite.vllm.wire import output_from_delta

logger = logging.getLogger(__name__)

#: A timer may fire this much before its deadline.
_ROUNDING_S = 0.01


@dataclass(frozen=True)
class _Ended:
    request_id: str
    error: DynamoLiteError


class Deliveries:
    """Deltas and errors from the failover client, in order, for one `RemoteCore`.

    `on_deltas` and `on_ended` are the failover client's callbacks.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[TokenDelta] | _Ended] = asyncio.Queue()

    def on_deltas(self, deltas: list[TokenDelta]) -> None:
        self._queue.put_nowait(deltas)

    def on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        self._queue.put_nowait(_Ended(request_id, error))

    async def get(self) -> list[TokenDelta] | _Ended:
        return await self._queue.get()


class FailRequest(Protocol):
    def __call__(self, request_id: str, error: Exception) -> list[str]:
        """Ends a sequence with `error`; returns the other sequences that end with it."""
        ...


class OpenCore(Protocol):
    """Makes the core of an engine client; a `partial` of `RemoteCore`."""

    def __call__(self, *, fail: FailRequest, causal: bool) -> "RemoteCore":
        """causal: whether the model is, see `is_causal`."""
        ...


class RemoteCore(EngineCoreClient):
    """The engine core of one `RemoteEngineClient`.

    failover: submits and aborts requests. deliveries: what `failover` delivers.
    members: the live workers. admission: the limits of this process.
    refused: counts requests that were not taken, by reason: "limit" (this process is at its
    limit), "busy" (all workers are), "no_worker" (no worker is registered or answers), "late"
    (timeout before a worker took it) and "rejected" (not acceptable to the engine).
    client_priority: the priorities that clients may ask for. tracer: None without tracing.
    """

    def __init__(
        self,
        failover: FailoverClient,
        deliveries: Deliveries,
        *,
        members: Callable[[], Sequence[EndpointRecord]],
        admission: Admission,
        refused: Counter[str],
        fail: FailRequest,
        causal: bool,
        client_priority: ClientPriority = "lower-only",
        tracer: Tracer | None = None,
    ):
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.admission, self.refused = admission, refused
        self._failover, self._deliveries = failover, deliveries
        self._members, self._fail, self._causal = members, fail, causal
        self._client_priority: ClientPriority = client_priority
        self._traces = None if tracer is None else RequestTraces(tracer)

    def check_admission(self, n: int) -> None:
        """Raises the 503 without a worker, the 429 if `n` more requests are too many."""
        if not self._members():
            raise self._refusal(NoWorkers("No worker is available. Please try again later."))
        if (busy := self.admission.busy(prompt_tokens=1, requests=n)) is not None:
            raise self._refusal(_overloaded(busy), "limit")

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Returns when a worker has the request.

        Raises VLLMValidationError (400) for a request that cannot be sent or that every
        worker would refuse, GracefulHTTPError (429, 503, 504) for one that is not taken now.
        """
        if request.abort_immediately:
            return  # releases blocks of vLLM's own KV transfer, which is not used here
        request.priority = granted_priority(request.priority, self._client_priority)
        try:
            message, plan = generate_request(
                request, _time_left_s(), _session(), causal=self._causal
            )
        except DeadlineExceeded as exc:
            raise self._refusal(exc) from exc
        verdict = self.admission.enter(message.request_id, len(message.prompt_token_ids))
        if isinstance(verdict, Busy):
            raise self._refusal(_overloaded(verdict), "limit")
        if self._traces is not None:
            message = self._traces.begin(message, request.sampling_params, _trace())
        if (context := current_context()) is not None:
            context.on_placing()
        try:
            await self._failover.submit(message, movable=plan)
        except DynamoLiteError as exc:
            self._leave(message.request_id, "refused", str(exc))
            raise self._refusal(exc) from exc
        except BaseException:
            self._leave(message.request_id, "abort")
            raise
        if self._traces is not None:
            self._traces.placed(message.request_id)

    def _leave(self, request_id: str, reason: str, error: str = "") -> None:
        """The request has ended, with or without an error."""
        self.admission.leave(request_id)
        if self._traces is not None:
            self._traces.ended(request_id, reason, error)

    def _refusal(self, error: DynamoLiteError, reason: str = "") -> VLLMError:
        """Counts the error as `reason` and returns the HTTP error for it."""
        late = isinstance(error, DeadlineExceeded) and _is_late()
        if isinstance(error, DeadlineExceeded) and not late:
            # A worker timed out; the request itself has time left.
            error = NoWorkers(str(error))
        if not reason:
            if isinstance(error, Refused):
                reason = "rejected"
            elif isinstance(error, Overloaded):
                reason = "busy"
            else:
                reason = "late" if late else "no_worker"
        self.refused[reason] += 1
        return http_error(error)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._leave(request_id, "abort")
        if request_ids:
            await self._failover.abort(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """One engine step of one worker."""
        while True:
            received = await self._deliveries.get()
            if isinstance(received, _Ended):
                await self._end(received)
                continue
            now = time.monotonic()
            outputs = [self._output(delta, now) for delta in received]
            failed = [o.request_id for o in outputs if o.finish_reason is FinishReason.ERROR]
            await self.abort_requests_async(failed)
            return EngineCoreOutputs(outputs=outputs, timestamp=now)

    def _output(self, delta: TokenDelta, now: float) -> EngineCoreOutput:
        """The delta as vLLM's output; an error if the delta is malformed."""
        if self._traces is not None:
            self._traces.delivered(delta)
        if delta.finish_reason is not None:
            self.admission.leave(delta.request_id)
        else:
            self.admission.answered(delta.request_id)
        try:
            return output_from_delta(delta, now)
        except ProtocolError as exc:
            logger.error("request %s: %s", delta.request_id, exc)
            return EngineCoreOutput(
                request_id=delta.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR
            )

    async def _end(self, ended: _Ended) -> None:
        """Also aborts the other sequences of the same request."""
        self._leave(ended.request_id, "error", str(ended.error))
        orphans = self._fail(ended.request_id, http_error(ended.error))
        await self.abort_requests_async(orphans)

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to do: failover client and transport belong to the component."""


def _time_left_s() -> float | None:
    """Time left of the current HTTP request. Raises DeadlineExceeded if none is left."""
    if (context := current_context()) is None:
        return None
    left_s = context.deadline - asyncio.get_running_loop().time()
    if left_s <= 0:
        raise DeadlineExceeded("the request", context.timeout_s)
    return left_s


def _session() -> str | None:
    context = current_context()
    return None if context is None else context.session


def _trace() -> TraceContext | None:
    context = current_context()
    return None if context is None else context.trace


def _is_late() -> bool:
    context = current_context()
    return context is not None and (
        asyncio.get_running_loop().time() >= context.deadline - _ROUNDING_S
    )


def _overloaded(busy: Busy) -> Overloaded:
    return Overloaded(busy.reason, retry_after_s=busy.retry_after_s)

"""vLLM's engine-core client, where the engine core is whichever worker takes a request.

Owns what may come in at this Frontend, the way from vLLM's requests to messages,
and the order in which deltas and ends reach vLLM's output processor. Workers are
chosen, and requests moved among them, by the failover client. Everything that
only makes sense next to an engine (sleep, profile, LoRA, weights) stays vLLM's
NotImplementedError, which its app answers with 501.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from vllm.exceptions import VLLMError
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

from dynamo_lite.policy.admission import Admission, Busy, Limits
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
from dynamo_lite.request_plane import FailoverClient
from dynamo_lite.runtime.tracing.tracer import Tracer
from dynamo_lite.vllm.frontend.edge import current_context, http_error
from dynamo_lite.vllm.frontend.request_trace import RequestTraces
from dynamo_lite.vllm.requests import generate_request
from dynamo_lite.vllm.wire import output_from_delta

logger = logging.getLogger(__name__)

#: A timer may fire this much before the deadline that it was made from.
_ROUNDING_S = 0.01


@dataclass(frozen=True)
class _Ended:
    request_id: str
    error: DynamoLiteError


class RemoteCore(EngineCoreClient):
    """members: the live workers. limits: what this process takes. client_priority: what
    clients may ask for.

    `on_deltas` and `on_ended` are the failover client's callbacks; `connect` must
    be called before the first request. `fail` is set by the engine client: it ends
    one request with an error and returns the other sequences that die with it.
    refused: how many requests were not taken, by "limit" (ours), "busy" (every
    worker's), "no_worker" (nobody is there, or answers), "late" (its time was up
    before a worker had it) and "rejected" (not acceptable to the engine). causal: whether
    the model is (`movable.is_causal`); the client sets it. tracer: None where nothing is
    traced.
    """

    def __init__(
        self,
        *,
        members: Callable[[], Sequence[EndpointRecord]],
        limits: Limits | None = None,
        client_priority: ClientPriority = "lower-only",
        tracer: Tracer | None = None,
    ):
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.fail: Callable[[str, Exception], list[str]] = lambda request_id, error: []
        self.causal = True
        self.refused: Counter[str] = Counter()
        self.admission = Admission(limits or Limits())
        self._members = members
        self._client_priority: ClientPriority = client_priority
        self._traces = None if tracer is None else RequestTraces(tracer)
        self._failover: FailoverClient | None = None
        self._received: asyncio.Queue[list[TokenDelta] | _Ended] = asyncio.Queue()

    def connect(self, failover: FailoverClient) -> None:
        self._failover = failover

    def on_deltas(self, deltas: list[TokenDelta]) -> None:
        self._received.put_nowait(deltas)

    def on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        self._received.put_nowait(_Ended(request_id, error))

    @property
    def failover(self) -> FailoverClient:
        assert self._failover is not None, "connect() comes first"
        return self._failover

    def check_admission(self, n: int) -> None:
        """Raises the 503 when there is nobody to ask, the 429 when `n` more are too many."""
        if not self._members():
            raise self._refusal(NoWorkers("No worker is available. Please try again later."))
        if (busy := self.admission.busy(prompt_tokens=1, requests=n)) is not None:
            raise self._refusal(_overloaded(busy), "limit")

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Returns when a worker has the request.

        Raises VLLMValidationError (400) for what cannot travel or is refused for
        good, GracefulHTTPError (429, 503, 504) when it is not taken now.
        """
        if request.abort_immediately:
            return  # releases blocks of vLLM's own KV transfer, which is not used here
        request.priority = granted_priority(request.priority, self._client_priority)
        try:
            message, plan = generate_request(
                request, _time_left_s(), _session(), causal=self.causal
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
            await self.failover.submit(message, movable=plan)
        except DynamoLiteError as exc:
            self._leave(message.request_id, "refused", str(exc))
            raise self._refusal(exc) from exc
        except BaseException:
            self._leave(message.request_id, "abort")
            raise
        if self._traces is not None:
            self._traces.placed(message.request_id)

    def _leave(self, request_id: str, reason: str, error: str = "") -> None:
        """It is over, however it ended."""
        self.admission.leave(request_id)
        if self._traces is not None:
            self._traces.ended(request_id, reason, error)

    def _refusal(self, error: DynamoLiteError, reason: str = "") -> VLLMError:
        """Counts it, and puts it in the words of the app."""
        late = isinstance(error, DeadlineExceeded) and _is_late()
        if isinstance(error, DeadlineExceeded) and not late:
            # A worker did not answer; the request itself has time left.
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
            await self.failover.abort(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """One engine step of one worker."""
        while True:
            received = await self._received.get()
            if isinstance(received, _Ended):
                await self._end(received)
                continue
            now = time.monotonic()
            outputs = [self._output(delta, now) for delta in received]
            failed = [o.request_id for o in outputs if o.finish_reason is FinishReason.ERROR]
            await self.abort_requests_async(failed)
            return EngineCoreOutputs(outputs=outputs, timestamp=now)

    def _output(self, delta: TokenDelta, now: float) -> EngineCoreOutput:
        """An error where the delta makes no sense."""
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
        """The other sequences of the same request end with it."""
        self._leave(ended.request_id, "error", str(ended.error))
        orphans = self.fail(ended.request_id, http_error(ended.error))
        await self.abort_requests_async(orphans)

    def shutdown(self, timeout: float | None = None) -> None:
        """Failover client and transport belong to the component."""


def _time_left_s() -> float | None:
    """Of the HTTP request that this is for. Raises DeadlineExceeded when none is."""
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

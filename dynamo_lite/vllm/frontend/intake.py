"""What both edges do with a request: admission, refusals, traces, and the failover client.

The edge in Python and the edge in Rust differ in how a request arrives and how its tokens
leave. Which requests are taken, how refusals are counted and what is traced is decided here.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from vllm.v1.engine import EngineCoreRequest

from dynamo_lite.disagg.decision.lanes import ClientPriority, granted_priority
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    NoWorkers,
    Overloaded,
    Refused,
)
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.request_plane.admission import Admission
from dynamo_lite.request_plane.base import OnDeltas
from dynamo_lite.request_plane.failover import FailoverClient, OnEnded
from dynamo_lite.runtime.tracing import Tracer
from dynamo_lite.vllm.frontend.request_context import RequestContext
from dynamo_lite.vllm.frontend.request_trace import RequestTraces
from dynamo_lite.vllm.requests import generate_request

#: A timer may fire this much before its deadline.
_ROUNDING_S = 0.01

#: By which refusals are counted; all others as "no_worker".
_REASONS = {Refused: "rejected", Overloaded: "busy", DeadlineExceeded: "late"}


class Intake:
    """The requests of one Frontend.

    failover: submits and aborts requests. admission: the limits of this process. refused: counts
    requests that were not taken, by reason: "limit" (this process is at its limit), "busy" (all
    workers are), "no_worker" (no worker is registered or answers), "late" (timeout before a worker
    took it) and "rejected" (not acceptable to the engine).
    client_priority: the priorities that clients may ask for. tracer: None without tracing.
    """

    def __init__(
        self,
        failover: FailoverClient,
        *,
        admission: Admission,
        refused: Counter[str],
        client_priority: ClientPriority = "lower-only",
        tracer: Tracer | None = None,
    ):
        self._failover = failover
        self.admission, self.refused = admission, refused
        self._client_priority: ClientPriority = client_priority
        self._traces = None if tracer is None else RequestTraces(tracer)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self.admission.in_flight

    def check(self, n: int) -> None:
        """Raises NoWorkers without a worker, Overloaded if `n` more requests are too many."""
        if not self._failover.members:
            raise self._refusal(NoWorkers("No worker is available. Please try again later."))
        if (busy := self.admission.busy(prompt_tokens=1, requests=n)) is not None:
            raise self._refusal(Overloaded(busy), "limit")

    def late(self, context: RequestContext) -> DynamoLiteError:
        """Counts a request whose time was over before it was submitted; returns its error."""
        return self._refusal(DeadlineExceeded("the request", context.timeout_s))

    async def submit(
        self, request: EngineCoreRequest, context: RequestContext | None, *, causal: bool
    ) -> None:
        """Returns when a worker has the request.

        context: of the HTTP request; None for a request without a time limit.
        causal: whether the model is, see `is_causal`.
        Raises VLLMValidationError for a request that cannot be sent; Refused, Overloaded,
        NoWorkers, another Unavailable or DeadlineExceeded for one that is not taken.
        """
        request.priority = granted_priority(request.priority, self._client_priority)
        timeout_s = None
        if context is not None and (timeout_s := _time_left_s(context)) <= 0:
            raise self.late(context)
        session = None if context is None else context.session
        message, plan = generate_request(request, timeout_s, session, causal=causal)
        busy = self.admission.enter(
            message.request_id,
            len(message.prompt_token_ids),
            input_bytes=len(message.inputs or b""),
        )
        if busy is not None:
            raise self._refusal(Overloaded(busy), "limit")
        if self._traces is not None:
            message = self._traces.begin(message, request.sampling_params, context)
        if context is not None:
            context.on_placing()
        try:
            await self._failover.submit(message, movable=plan)
        except DynamoLiteError as exc:
            self.leave(message.request_id, "refused", str(exc))
            if isinstance(exc, DeadlineExceeded) and not _is_late(context):
                # A worker timed out; the request itself has time left.
                raise self._refusal(NoWorkers(str(exc))) from exc
            raise self._refusal(exc) from exc
        except BaseException:
            self.leave(message.request_id, "abort")
            raise
        if self._traces is not None:
            self._traces.placed(message.request_id)

    def delivered(self, delta: TokenDelta) -> None:
        """A worker has sent this delta."""
        if self._traces is not None:
            self._traces.delivered(delta)
        if delta.finish_reason is not None:
            self.admission.leave(delta.request_id)
        else:
            self.admission.answered(delta.request_id)

    def leave(self, request_id: str, reason: str, error: str = "") -> None:
        """The request has ended without a last delta. Unknown ids are ignored."""
        self.admission.leave(request_id)
        if self._traces is not None:
            self._traces.ended(request_id, reason, error)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cancels requests; no delta of them follows."""
        for request_id in request_ids:
            self.leave(request_id, "abort")
        if request_ids:
            await self._failover.abort(request_ids)

    def _refusal(self, error: DynamoLiteError, reason: str = "") -> DynamoLiteError:
        """Counts the error, and returns it. reason: default by its type."""
        self.refused[reason or _REASONS.get(type(error), "no_worker")] += 1
        return error


#: Opens the intake of an edge with these callbacks of its failover client.
OpenIntake = Callable[[OnDeltas, OnEnded], Awaitable[Intake]]


def _time_left_s(context: RequestContext) -> float:
    return context.deadline - asyncio.get_running_loop().time()


def _is_late(context: RequestContext | None) -> bool:
    return context is not None and (
        asyncio.get_running_loop().time() >= context.deadline - _ROUNDING_S
    )

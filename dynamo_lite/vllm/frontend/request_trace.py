"""The Frontend's spans of each traced sequence."""

import time
from dataclasses import dataclass, field

import msgspec
from vllm import SamplingParams
from vllm.tracing import SpanAttributes

from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.trace import TraceContext
from dynamo_lite.runtime.tracing import Tracer
from dynamo_lite.vllm.frontend.request_context import RequestContext


@dataclass
class _Open:
    context: TraceContext
    parent: str
    began: float
    attributes: dict[str, str | bool | int | float] = field(default_factory=dict)
    tokens: int = 0


class RequestTraces:
    """The spans' attributes have vLLM's names."""

    def __init__(self, tracer: Tracer):
        self._tracer = tracer
        self._open: dict[str, _Open] = {}

    def begin(
        self,
        request: GenerateRequest,
        params: SamplingParams | None,
        http: RequestContext | None,
    ) -> GenerateRequest:
        """Opens the span of a sequence; returns the message with the trace headers for workers.

        http: the HTTP request of the sequence, whose client's trace it continues; None without
        one: then it is not traced.
        """
        context = None if http is None else self._tracer.begin(http.trace)
        if http is None or context is None:
            return msgspec.structs.replace(request, trace_headers=None)
        parent = "" if http.trace is None else http.trace.span_id
        entry = self._open[request.request_id] = _Open(context, parent, time.monotonic())
        entry.attributes[SpanAttributes.GEN_AI_REQUEST_ID] = request.request_id
        entry.attributes[SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS] = len(request.prompt_token_ids)
        if params is not None:
            entry.attributes[SpanAttributes.GEN_AI_REQUEST_TEMPERATURE] = params.temperature
            entry.attributes[SpanAttributes.GEN_AI_REQUEST_TOP_P] = params.top_p
            if params.max_tokens is not None:
                entry.attributes[SpanAttributes.GEN_AI_REQUEST_MAX_TOKENS] = params.max_tokens
        return msgspec.structs.replace(request, trace_headers=entry.context.headers())

    def placed(self, request_id: str) -> None:
        """A worker has accepted the sequence."""
        if (entry := self._open.get(request_id)) is not None:
            self._tracer.record_child("route", entry.context, entry.began, time.monotonic())

    def delivered(self, delta: TokenDelta) -> None:
        if (entry := self._open.get(delta.request_id)) is None:
            return
        if delta.token_ids and not entry.tokens:
            first_s = time.monotonic() - entry.began
            entry.attributes[SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN] = first_s
        entry.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.ended(delta.request_id, delta.finish_reason)

    def ended(self, request_id: str, reason: str, error: str = "") -> None:
        """Closes the span. Ignores sequences that have ended or are not traced."""
        if (entry := self._open.pop(request_id, None)) is None:
            return
        now = time.monotonic()
        entry.attributes[SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS] = entry.tokens
        entry.attributes[SpanAttributes.GEN_AI_LATENCY_E2E] = now - entry.began
        entry.attributes["dynamo_lite.finish_reason"] = reason
        self._tracer.record(
            "generate",
            entry.context,
            entry.parent,
            entry.began,
            now,
            kind="client",
            attributes=entry.attributes,
            error=error,
        )

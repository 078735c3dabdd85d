"""Spans of a decode worker for each traced request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.trace import TraceContext, traced
from dynamo_lite.request_plane.base import GenerateHandler
from dynamo_lite.runtime.tracing import Tracer


@dataclass
class _Open:
    request: GenerateRequest
    context: TraceContext
    parent: str
    arrived: float
    tokens: int = 0


class TracedGeneration:
    """Implements GenerateHandler around an engine: from a request's arrival to its end.

    `delivered` must be called with all deltas.
    """

    def __init__(self, engine: GenerateHandler, tracer: Tracer):
        self._engine, self._tracer = engine, tracer
        self._open: dict[str, _Open] = {}

    async def submit(self, request: GenerateRequest) -> None:
        parent = traced(request.trace_headers)
        if parent is None:
            # Invalid headers are not passed on to the engine.
            plain = msgspec.structs.replace(request, trace_headers=None)
            await self._engine.submit(plain if request.trace_headers else request)
            return
        context = parent.child()
        entry = _Open(request, context, parent.span_id, time.monotonic())
        self._open[request.request_id] = entry
        try:
            await self._engine.submit(
                msgspec.structs.replace(request, trace_headers=context.headers())
            )
        except BaseException as exc:
            self._end(request.request_id, "", str(exc) or type(exc).__name__)
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._end(request_id, "abort")
        await self._engine.abort(request_ids)

    def delivered(self, deltas: Sequence[TokenDelta]) -> None:
        """One engine step's output."""
        if not self._open:
            return
        for delta in deltas:
            if (entry := self._open.get(delta.request_id)) is None:
                continue
            entry.tokens += len(delta.token_ids)
            if delta.prefill is not None:
                now = time.monotonic()
                began = max(entry.arrived, now - delta.prefill.prefill_s)
                self._tracer.record_child("first token", entry.context, began, now)
            if delta.finish_reason is not None:
                self._end(delta.request_id, delta.finish_reason)

    def _end(self, request_id: str, reason: str, error: str = "") -> None:
        if (entry := self._open.pop(request_id, None)) is None:
            return
        self._tracer.record(
            "decode worker",
            entry.context,
            entry.parent,
            entry.arrived,
            time.monotonic(),
            kind="server",
            attributes={
                "gen_ai.request.id": request_id,
                "gen_ai.usage.prompt_tokens": len(entry.request.prompt_token_ids),
                "gen_ai.usage.completion_tokens": entry.tokens,
                "dynamo_lite.finish_reason": reason,
            },
            error=error or ("the engine failed" if reason == "error" else ""),
        )

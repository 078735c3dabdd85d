"""Converts vLLM's engine types to wire messages and back, at both ends of a token stream.

The decode worker converts each `EngineCoreOutput` to a `TokenDelta`. The Frontend converts
it back for vLLM's own output processor. Sampling parameters are sent as msgpack of vLLM's
own struct, and validated when decoded.
"""

import logging
import time

import msgspec
from vllm.exceptions import VLLMError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    FINISH_REASON_STRINGS,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.generate import PrefillCounts, TokenDelta
from dynamo_lite.vllm.compat import engine_error
from dynamo_lite.vllm.logprobs import lists_of, rows_of, tensors_of

logger = logging.getLogger(__name__)

#: The key of `extra_args` that reaches a KV connector. Clients must not set it.
KV_TRANSFER_PARAMS = "kv_transfer_params"
#: Clients must not set the mode of KV events either: routers need only the changes.
_RESERVED = frozenset({KV_TRANSFER_PARAMS, "kv_cache_report_mode"})

_FINISH_REASONS = {name: FinishReason(i) for i, name in enumerate(FINISH_REASON_STRINGS)}


_sampling_encoder = msgspec.msgpack.Encoder()
_sampling_decoder = msgspec.msgpack.Decoder(SamplingParams)


def sampling_to_bytes(params: SamplingParams) -> bytes:
    """Raises ProtocolError if a parameter cannot be encoded (an array, an object, half of a
    surrogate pair).
    """
    try:
        return _sampling_encoder.encode(params)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ProtocolError(f"sampling parameters: {exc}") from exc


def sampling_from_bytes(data: bytes) -> SamplingParams:
    """Raises ProtocolError if `data` is not valid sampling parameters.

    Drops `kv_transfer_params`: a client must not control block writes. The worker sets its own
    afterwards.
    """
    try:
        params = _sampling_decoder.decode(data)
    except (msgspec.DecodeError, VLLMError, TypeError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"malformed sampling parameters: {exc}") from exc
    if params.extra_args:
        kept = {key: value for key, value in params.extra_args.items() if key not in _RESERVED}
        params.extra_args = kept or None
    return params


def delta_from_output(output: EngineCoreOutput, timestamp: float | None = None) -> TokenDelta:
    """Converts one engine output.

    timestamp: `EngineCoreOutputs.timestamp` of the step (the engine's monotonic clock);
    default now.
    """
    reason = output.finish_reason
    stats = output.prefill_stats
    return TokenDelta(
        request_id=output.request_id,
        token_ids=output.new_token_ids,
        finish_reason=None if reason is None else FINISH_REASON_STRINGS[reason],
        stop_reason=output.stop_reason,
        prefill=None if stats is None else _prefill_counts(stats, output.events, timestamp),
        logprobs=None if output.new_logprobs is None else rows_of(output.new_logprobs),
        prompt_logprobs=(
            None
            if output.new_prompt_logprobs_tensors is None
            else rows_of(output.new_prompt_logprobs_tensors.tolists())
        ),
        error=engine_error(output) if reason is FinishReason.ERROR else None,
    )


def output_from_delta(delta: TokenDelta, now: float) -> EngineCoreOutput:
    """Converts a delta for vLLM's output processor.

    now: this process's monotonic clock; the engine's times are made relative to it. Raises
    ProtocolError for an unknown finish reason or logprobs of inconsistent size.
    """
    output = EngineCoreOutput(request_id=delta.request_id, new_token_ids=delta.token_ids)
    if delta.finish_reason is not None:
        output.finish_reason = _FINISH_REASONS.get(delta.finish_reason)
        if output.finish_reason is None:
            raise ProtocolError(f"unknown finish reason {delta.finish_reason!r}")
        output.stop_reason = delta.stop_reason
    if delta.prefill is not None:
        output.prefill_stats = _prefill_stats(delta.prefill)
        output.events = _events(delta.prefill, now)
    if delta.logprobs is not None:
        output.new_logprobs = lists_of(delta.logprobs)
    if delta.prompt_logprobs is not None:
        output.new_prompt_logprobs_tensors = tensors_of(delta.prompt_logprobs)
    return output


def output_or_error(delta: TokenDelta, now: float) -> EngineCoreOutput:
    """As `output_from_delta`; an error, which is logged, for a malformed delta."""
    try:
        return output_from_delta(delta, now)
    except ProtocolError as exc:
        logger.error("request %s: %s", delta.request_id, exc)
        return error_output(delta.request_id)


def error_output(request_id: str) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR
    )


def _prefill_counts(
    stats: PrefillStats, events: list[EngineCoreEvent] | None, timestamp: float | None
) -> PrefillCounts:
    times = {event.type: event.timestamp for event in events or ()}
    queued = times.get(EngineCoreEventType.QUEUED)
    scheduled = times.get(EngineCoreEventType.SCHEDULED)
    waited_s = prefill_s = 0.0
    if queued is not None and scheduled is not None:
        now = time.monotonic() if timestamp is None else timestamp
        waited_s, prefill_s = max(0.0, scheduled - queued), max(0.0, now - scheduled)
    return PrefillCounts(
        prompt_tokens=stats.num_prompt_tokens,
        local_cached_tokens=stats.num_local_cached_tokens,
        external_cached_tokens=stats.num_external_cached_tokens,
        waited_s=waited_s,
        prefill_s=prefill_s,
        cached_tokens=stats.num_cached_tokens,
        created_cache_tokens=stats.num_cache_creation_tokens,
    )


def _prefill_stats(counts: PrefillCounts) -> PrefillStats:
    stats = PrefillStats()
    here = counts.local_cached_tokens + counts.external_cached_tokens
    cached, created = counts.cached_tokens, counts.created_cache_tokens
    if min(here, cached, created) < 0 or max(here, cached, created) > counts.prompt_tokens:
        raise ProtocolError(f"cached tokens of a prompt of {counts.prompt_tokens}: {counts}")
    stats.set(counts.prompt_tokens, counts.local_cached_tokens, counts.external_cached_tokens)
    # External tokens may have been computed for this request, so they are not all cached ones.
    stats.num_cached_tokens, stats.num_cache_creation_tokens = cached, created
    return stats


def _events(counts: PrefillCounts, now: float) -> list[EngineCoreEvent]:
    scheduled = now - counts.prefill_s
    return [
        EngineCoreEvent(EngineCoreEventType.QUEUED, scheduled - counts.waited_s),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled),
    ]

"""vLLM's engine types to wire messages and back, for both ends of a token stream.

The decode worker turns each `EngineCoreOutput` into a `TokenDelta`; the frontend
turns it back, so that vLLM's own output processor runs there. Sampling
parameters travel as msgpack of vLLM's own struct, typed on decode.
"""

import time
from typing import Any

import msgspec
import numpy as np
import torch
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
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.generate import LogprobRows, PrefillCounts, TokenDelta

#: The key of `extra_args` that reaches a KV connector: never a client's to set.
KV_TRANSFER_PARAMS = "kv_transfer_params"
#: Nor what makes KV events say more than what has changed.
_NOT_A_CLIENTS = frozenset({KV_TRANSFER_PARAMS, "kv_cache_report_mode"})

_FINISH_REASONS = {name: FinishReason(i) for i, name in enumerate(FINISH_REASON_STRINGS)}


def _unsupported(value: Any) -> Any:
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _undecodable(wanted: type, value: Any) -> Any:
    raise ValueError(f"{wanted.__name__} does not travel")


_sampling_encoder = msgspec.msgpack.Encoder(enc_hook=_unsupported)
_sampling_decoder = msgspec.msgpack.Decoder(SamplingParams, dec_hook=_undecodable)


def sampling_to_bytes(params: SamplingParams) -> bytes:
    """Raises ProtocolError when a parameter cannot travel (an array, an object, half of a
    surrogate pair).

    `kv_transfer_params` are left out: a client must not steer block writes.
    """
    try:
        return _sampling_encoder.encode(_without_steering(params))
    except (NotImplementedError, TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ProtocolError(f"sampling parameters: {exc}") from exc


def sampling_from_bytes(data: bytes) -> SamplingParams:
    """Raises ProtocolError when `data` is not valid sampling parameters.

    `kv_transfer_params` are dropped here too, because anybody on the subject may
    have sent them; the engine that runs the request sets its own.
    """
    try:
        params = _sampling_decoder.decode(data)
    except (msgspec.DecodeError, VLLMError, TypeError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"malformed sampling parameters: {exc}") from exc
    return _without_steering(params)


def _without_steering(params: SamplingParams) -> SamplingParams:
    extra = params.extra_args
    if not extra or _NOT_A_CLIENTS.isdisjoint(extra):
        return params
    kept = {key: value for key, value in extra.items() if key not in _NOT_A_CLIENTS}
    params = params.clone()
    params.extra_args = kept or None
    return params


def delta_from_output(output: EngineCoreOutput, timestamp: float | None = None) -> TokenDelta:
    """The wire form of one engine output.

    timestamp: `EngineCoreOutputs.timestamp` of the step (the engine's monotonic
    clock); now when left out.
    """
    reason = output.finish_reason
    stats = output.prefill_stats
    return TokenDelta(
        request_id=output.request_id,
        token_ids=output.new_token_ids,
        finish_reason=None if reason is None else FINISH_REASON_STRINGS[reason],
        stop_reason=output.stop_reason,
        prefill=None if stats is None else _prefill_counts(stats, output.events, timestamp),
        logprobs=None if output.new_logprobs is None else _rows(*output.new_logprobs[:3]),
        prompt_logprobs=(
            None
            if output.new_prompt_logprobs_tensors is None
            else _rows(*(t.cpu().numpy() for t in output.new_prompt_logprobs_tensors[:3]))
        ),
    )


def output_from_delta(delta: TokenDelta, now: float) -> EngineCoreOutput:
    """What the engine said, for vLLM's output processor.

    now: this process's monotonic clock, to which the engine's waiting and
    prefill times are related. Raises ProtocolError for an unknown finish reason
    or logprobs whose sizes do not add up.
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
        output.new_logprobs = LogprobsLists(*_arrays(delta.logprobs))
    if delta.prompt_logprobs is not None:
        # Copied: torch wants writable memory.
        ids, logprobs, ranks = (
            torch.from_numpy(array.copy()) for array in _arrays(delta.prompt_logprobs)
        )
        output.new_prompt_logprobs_tensors = LogprobsTensors(ids, logprobs, ranks)
    return output


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
    )


def _prefill_stats(counts: PrefillCounts) -> PrefillStats:
    stats = PrefillStats()
    cached = counts.local_cached_tokens + counts.external_cached_tokens
    if not 0 <= cached <= counts.prompt_tokens:
        raise ProtocolError(f"{cached} cached tokens of a prompt of {counts.prompt_tokens}")
    stats.set(counts.prompt_tokens, counts.local_cached_tokens, counts.external_cached_tokens)
    return stats


def _events(counts: PrefillCounts, now: float) -> list[EngineCoreEvent]:
    scheduled = now - counts.prefill_s
    return [
        EngineCoreEvent(EngineCoreEventType.QUEUED, scheduled - counts.waited_s),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled),
    ]


def _rows(token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> LogprobRows:
    rows, width = logprobs.shape
    return LogprobRows(
        rows=rows,
        width=width,
        token_ids=token_ids.astype("<i8", copy=False).tobytes(),
        logprobs=logprobs.astype("<f4", copy=False).tobytes(),
        ranks=ranks.astype("<i8", copy=False).tobytes(),
    )


def _arrays(rows: LogprobRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cells = rows.rows * rows.width
    sizes = (len(rows.token_ids), len(rows.logprobs), len(rows.ranks))
    if rows.rows < 0 or rows.width < 1 or sizes != (8 * cells, 4 * cells, 8 * rows.rows):
        raise ProtocolError(f"logprobs of {rows.rows} x {rows.width} in {sizes} bytes")
    shape = (rows.rows, rows.width)
    return (
        np.frombuffer(rows.token_ids, "<i8").reshape(shape),
        np.frombuffer(rows.logprobs, "<f4").reshape(shape),
        np.frombuffer(rows.ranks, "<i8"),
    )

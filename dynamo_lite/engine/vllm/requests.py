"""Messages from the network to vLLM's engine requests, checked at the engine's door.

What would break an engine's step is refused here: the engine's process serves
everybody, and an exception in its loop ends it.
"""

import time
from collections.abc import Sequence

from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.exceptions import VLLMError
from vllm.v1.engine import EngineCoreRequest

from dynamo_lite.engine.vllm.wire import KV_TRANSFER_PARAMS, sampling_from_bytes
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import ProtocolError, Refused
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata


def generation(request: GenerateRequest, model: ModelConfig) -> EngineCoreRequest:
    """Raises Refused when this model cannot take the request."""
    try:
        sampling = sampling_from_bytes(request.sampling)
        sampling.verify(model, None, None, None)
    except (ProtocolError, VLLMError) as exc:
        raise Refused(str(exc), elsewhere=False) from exc
    if sampling.n != 1:
        raise Refused("n > 1 must be fanned out by the frontend", elsewhere=False)
    _check_prompt(request.prompt_token_ids, model)
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=request.arrival_time,
        lora_request=None,
        cache_salt=request.cache_salt,
        data_parallel_rank=None,
        priority=request.priority,
        trace_headers=request.trace_headers,
        external_req_id=request.request_id,
        reasoning_ended=request.reasoning_ended,
        reasoning_parser_kwargs=request.reasoning_parser_kwargs,
    )


def prefill(
    job: RemotePrefillRequest, target: EngineMetadata, forget: list[str], model: ModelConfig
) -> EngineCoreRequest:
    """A job as a one-token request; its transfer parameters reach the connector.

    forget: decode engines that have left. Raises Refused.
    """
    _check_prompt(job.prompt_token_ids, model)
    transfer = {
        "attempt": job.attempt,
        "engine_id": job.engine_id,
        "num_computed_tokens": job.num_computed_tokens,
        "block_ids": job.block_ids,
        "target": encode(target),
        "forget": forget,
    }
    return EngineCoreRequest(
        request_id=job.attempt,
        prompt_token_ids=job.prompt_token_ids,
        mm_features=None,
        sampling_params=SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args={KV_TRANSFER_PARAMS: transfer},
        ),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=job.cache_salt,
        data_parallel_rank=None,
        priority=job.priority,
        trace_headers=job.trace_headers,
        external_req_id=job.request_id,
    )


def _check_prompt(prompt: Sequence[int], model: ModelConfig) -> None:
    longest = model.max_model_len - 1
    if not 1 <= len(prompt) <= longest:
        raise Refused(
            f"prompt of {len(prompt)} tokens; this model takes 1 to {longest}", elsewhere=False
        )
    if max(prompt) >= model.get_vocab_size():
        raise Refused(f"token id {max(prompt)} is outside the vocabulary", elsewhere=False)

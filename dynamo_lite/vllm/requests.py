"""Converts vLLM's engine requests to messages at the Frontend, and back at the worker.

It refuses requests that would break an engine's step: an exception there ends the engine's
process with all its requests.
"""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from vllm import SamplingParams
from vllm.config import ModelConfig, SpeculativeConfig
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest

from dynamo_lite.disagg.transfer_params import (
    PrefillJobParams,
    decode_params,
    pack,
    with_first_token,
)
from dynamo_lite.protocol.errors import ProtocolError, Refused
from dynamo_lite.protocol.generate import MAX_DELTA_BYTES, Adapter, GenerateRequest
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.request_plane.failover import MAX_REQUEST_ID
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.vllm.inputs import Inputs, inputs_from_bytes, inputs_to_bytes, text_of
from dynamo_lite.vllm.migratable import is_causal, migration_plan
from dynamo_lite.vllm.wire import KV_TRANSFER_PARAMS, sampling_from_bytes, sampling_to_bytes


def generate_request(
    request: EngineCoreRequest,
    timeout_s: float | None,
    session: str | None = None,
    *,
    causal: bool = True,
) -> tuple[GenerateRequest, MigrationPlan]:
    """Returns the message, and how it can be migrated if its worker is lost.

    timeout_s: time left. session: see `GenerateRequest`. causal: see `is_causal`.
    Raises VLLMValidationError for a request that is not supported or cannot be encoded.
    """
    params = _sampling(request)
    try:
        sampling = sampling_to_bytes(params)
    except ProtocolError as exc:
        raise VLLMValidationError(f"Not served here: {exc}") from exc
    embedded = 0 if request.prompt_embeds is None else len(request.prompt_embeds)
    lora = request.lora_request
    only_tokens = not request.mm_features and request.prompt_embeds is None
    message = GenerateRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids or [0] * embedded,
        sampling=sampling,
        arrival_time=request.arrival_time,
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=None if lora is None else Adapter(name=lora.lora_name, path=lora.lora_path),
        inputs=None if only_tokens else inputs_to_bytes(request),
        trace_headers=dict(request.trace_headers) if request.trace_headers else None,
        reasoning_ended=request.reasoning_ended,
        reasoning_parser_kwargs=request.reasoning_parser_kwargs,
        timeout_s=timeout_s,
        session=session,
    )
    # Generated tokens cannot become the end of a prompt of embeddings.
    return message, migration_plan(params, causal=causal and request.prompt_embeds is None)


def _sampling(request: EngineCoreRequest) -> SamplingParams:
    """The sampling parameters of a supported request. Raises VLLMValidationError."""
    params = request.sampling_params
    if params is None or request.pooling_params is not None:
        raise VLLMValidationError("Only text generation is served here")
    if request.resumable:
        raise VLLMValidationError("Streamed prompts are not served here")
    # Logs and terminals show it as it is.
    if len(request.request_id) > MAX_REQUEST_ID or not request.request_id.isprintable():
        raise VLLMValidationError(
            f"The request id may have at most {MAX_REQUEST_ID} characters, all of them printable",
            parameter="request_id",
        )
    return params


def generation(
    request: GenerateRequest,
    model: ModelConfig,
    *,
    connected: bool = False,
    loaded: tuple[Adapter, LoRARequest] | None = None,
    most_embeds: Mapping[str, int] = MappingProxyType({}),
    speculation: SpeculativeConfig | None = None,
) -> EngineCoreRequest:
    """Converts a message for the engine. Raises Refused if this model cannot take it.

    connected: the engine has a connector, which gets the request's deadline and adapter. loaded:
    its adapter in this engine. most_embeds: of `inputs.most_embeds`. speculation: the engine's.

    For a migrated request, tokens that another engine has generated become the end of the
    prompt, and the limits shrink by their number.
    """
    try:
        sampling = sampling_from_bytes(request.sampling)
        sampling.verify(model, speculation, None, None)
    except (ProtocolError, VLLMError, ValueError) as exc:
        raise Refused(str(exc), elsewhere=False) from exc
    _check_logprobs(sampling.prompt_logprobs, len(request.prompt_token_ids), model)
    if sampling.n != 1:
        raise Refused("n > 1 must be fanned out by the frontend", elsewhere=False)
    prompt, inputs = request.prompt_token_ids, Inputs()
    text: Sequence[int] = prompt
    if request.inputs is not None:
        inputs = inputs_from_bytes(request.inputs, len(prompt), model, most_embeds)
        text = text_of(prompt, inputs)
    _check_prompt(text, model)
    if sampling.max_tokens is None:
        sampling.max_tokens = model.max_model_len - len(prompt)
    embedded = inputs.embeddings is not None
    if request.output_token_ids:
        if embedded or not is_causal(model):
            raise Refused(
                "generated tokens cannot become the end of this prompt: it has embeddings, or the"
                " model is not causal",
                elsewhere=False,
            )
        prompt = prompt + request.output_token_ids
        _check_prompt([*text, *request.output_token_ids], model)
        _continue_after(len(request.output_token_ids), sampling)
    adapter, lora = loaded or (None, None)
    params = decode_params(request.timeout_s, time.monotonic(), adapter)
    if connected and params is not None:
        sampling.extra_args = {**(sampling.extra_args or {}), KV_TRANSFER_PARAMS: params}
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        mm_features=inputs.features,
        prompt_embeds=inputs.embeddings,
        # Where vLLM looks for a token in place of an embedding, it finds that of another request,
        # or fails: so it gets the zeros that the message has.
        prompt_is_token_ids=inputs.token_positions or ([False] * len(prompt) if embedded else None),
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=request.arrival_time,
        lora_request=lora,
        cache_salt=request.cache_salt,
        data_parallel_rank=None,
        priority=request.priority,
        trace_headers=request.trace_headers,
        external_req_id=request.request_id,
        reasoning_ended=request.reasoning_ended,
        reasoning_parser_kwargs=request.reasoning_parser_kwargs,
    )


def ask_first_token(request: EngineCoreRequest) -> None:
    """Lets a prefill worker compute the first token of a request from `generation`."""
    params = request.sampling_params
    assert params is not None
    extra = params.extra_args or {}
    transfer = with_first_token(extra.get(KV_TRANSFER_PARAMS))
    params.extra_args = {**extra, KV_TRANSFER_PARAMS: transfer}


def prefill(
    job: RemotePrefillRequest,
    target: EngineMetadata,
    cell: Cell,
    model: ModelConfig,
    *,
    first_token: bool = False,
    lora: LoRARequest | None = None,
) -> EngineCoreRequest:
    """Converts a job to a one-token request with parameters for the connector.

    first_token: the request's token is the first one of the answer, if the job asks for it;
    otherwise it is ignored. cell: see `PrefillJobParams`. lora: the
    job's adapter in this engine. Raises Refused.
    """
    prompt = job.prompt_token_ids
    if first_token and job.first_token is not None:
        prompt = [*prompt, job.first_token.last_token_id]
    _check_prompt(prompt, model)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    sampling.watermarking = False
    transfer = pack(PrefillJobParams.of(job, target, cell))
    sampling.extra_args = {KV_TRANSFER_PARAMS: transfer}
    return EngineCoreRequest(
        request_id=job.attempt,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=lora,
        cache_salt=job.cache_salt,
        data_parallel_rank=None,
        priority=job.priority,
        trace_headers=job.trace_headers,
        external_req_id=job.request_id,
    )


def _continue_after(generated: int, sampling: SamplingParams) -> None:
    """Adapts `sampling` for a request that has `generated` tokens already.

    Log-probabilities of the prompt were sent with the first of them.
    """
    assert sampling.max_tokens is not None
    if generated >= sampling.max_tokens:
        raise Refused(
            f"no tokens left: {generated} of {sampling.max_tokens} were generated by other engines",
            elsewhere=False,
        )
    sampling.max_tokens -= generated
    sampling.min_tokens = max(0, sampling.min_tokens - generated)
    if sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None:
        sampling.prompt_logprobs = None
        sampling.prompt_logprob_token_ids = None
        sampling.prompt_logprob_start = None
        # vLLM sets this for prompts with log-probabilities, which are not needed any more.
        sampling.skip_reading_prefix_cache = False


def _check_logprobs(asked: int | None, tokens: int, model: ModelConfig) -> None:
    """asked: candidates for each of the prompt's tokens; -1 is the whole vocabulary."""
    candidates = model.get_vocab_size() if asked == -1 else asked or 0
    size = tokens * (12 * (candidates + 1) + 8)  # of `LogprobRows`
    if candidates and size > MAX_DELTA_BYTES:
        raise Refused(
            f"prompt_logprobs of {candidates} for this prompt are {size} bytes; at most"
            f" {MAX_DELTA_BYTES} are served: ask for fewer, or for a shorter prompt",
            elsewhere=False,
        )


def _check_prompt(prompt: Sequence[int], model: ModelConfig) -> None:
    longest = model.max_model_len - 1
    if not 1 <= len(prompt) <= longest:
        raise Refused(
            f"prompt of {len(prompt)} tokens; this model takes 1 to {longest}", elsewhere=False
        )
    if max(prompt) >= model.get_vocab_size():
        raise Refused(f"token id {max(prompt)} is outside the vocabulary", elsewhere=False)

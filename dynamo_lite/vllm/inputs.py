"""What a prompt has beside its token ids: images and other media, and embeddings.

The Frontend turns media into features (the tensors that the model's encoder takes). They go to
the worker with the request, in vLLM's own msgpack, and whole: a worker may have none of those that
were sent before. Each worker computes them itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import (
    CUSTOM_TYPE_RAW_VIEW,
    MMF_CLASS_TO_FACTORY,
    MsgpackDecoder,
    MsgpackEncoder,
)

from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import MAX_INPUT_BYTES


class Inputs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Either features, or embeddings of all positions (tensor[prompt tokens, hidden size]).

    token_positions: where embeddings are not used, because there is a token; None if nowhere.
    """

    features: list[MultiModalFeatureSpec] | None = None
    embeddings: torch.Tensor | None = None
    token_positions: list[bool] | None = None


class _Decoder(MsgpackDecoder):
    """Accepts no pickled object, whatever vLLM's environment variables say."""

    def ext_hook(self, code: int, data: memoryview) -> Any:
        if code != CUSTOM_TYPE_RAW_VIEW:
            raise ValueError(f"extension type {code}")
        return data

    def _decode_mm_field_elem(self, obj: dict[str, Any]) -> Any:
        if obj["field"][0] not in MMF_CLASS_TO_FACTORY.values():
            raise ValueError(f"field {obj['field'][0]!r}")
        return super()._decode_mm_field_elem(obj)


# All tensors within the message: it is one field of another message.
_encoder = MsgpackEncoder(size_threshold=1 << 62)
_decoder = _Decoder(Inputs)


def takes_media(model: ModelConfig) -> bool:
    """Whether its prompts may have more than text."""
    return model.supports_multimodal_inputs or model.enable_prompt_embeds


def most_embeds(config: VllmConfig) -> dict[str, int]:
    """By the modalities that the engine takes: the most embeddings of one feature, which the
    encoder's cache must hold. Loads the model's processor, which may take seconds."""
    if not config.model_config.supports_multimodal_inputs:
        return {}
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
    embedded = config.model_config.get_multimodal_config().enable_mm_embeds
    taken = [modality for modality, most in budget.mm_limits.items() if most != 0 or embedded]
    if config.model_config.enable_prompt_embeds:  # beside media they are features
        taken.append("prompt_embeds")
    return dict.fromkeys(taken, budget.encoder_cache_size)


def inputs_to_bytes(request: EngineCoreRequest) -> bytes:
    """Raises VLLMValidationError if they cannot be sent."""
    inputs = Inputs(
        features=request.mm_features or None,
        embeddings=request.prompt_embeds,
        token_positions=request.prompt_is_token_ids,
    )
    try:
        (encoded,) = _encoder.encode(inputs)
    except (TypeError, ValueError) as exc:
        raise VLLMValidationError(f"Media of this prompt cannot be sent: {exc}") from exc
    if len(encoded) > MAX_INPUT_BYTES:
        raise VLLMValidationError(
            f"The images and other media of this prompt are {len(encoded)} bytes as the model's"
            f" input, and at most {MAX_INPUT_BYTES} are served: send fewer, or smaller ones"
        )
    assert isinstance(encoded, bytes)
    return encoded


def inputs_from_bytes(
    data: bytes, tokens: int, model: ModelConfig, limits: Mapping[str, int]
) -> Inputs:
    """Raises Refused for what this model's engine cannot take.

    tokens: of the prompt. limits: see `most_embeds`.
    """
    try:
        # Writable: torch warns of any other memory.
        inputs: Inputs = _decoder.decode(bytearray(data))
    except Exception as exc:  # vLLM's decoder raises whatever it meets
        raise Refused(f"malformed media of a prompt: {exc}", elsewhere=False) from exc
    if inputs.embeddings is not None:
        problem = _wrong_embeddings(inputs, inputs.embeddings, tokens, model)
    elif not model.supports_multimodal_inputs:
        problem = "this model takes text only"
    else:
        problem = _wrong_features(inputs.features or (), tokens, limits)
    if problem:
        raise Refused(problem, elsewhere=False)
    return inputs


def text_of(prompt: Sequence[int], inputs: Inputs) -> list[int]:
    """The tokens that are text: a placeholder of media may be outside of the vocabulary."""
    text = list(prompt)
    for feature in inputs.features or ():
        place = feature.mm_position
        text[place.offset : place.offset + place.length] = [0] * place.length
    for position, is_text in enumerate(inputs.token_positions or ()):
        text[position] *= is_text
    return text


def _wrong_embeddings(
    inputs: Inputs, embeddings: torch.Tensor, tokens: int, model: ModelConfig
) -> str:
    if not model.enable_prompt_embeds:
        return "prompt embeddings: this worker's engine takes none (enable-prompt-embeds)"
    wanted = (tokens, model.get_inputs_embeds_size())
    if tuple(embeddings.shape) != wanted or not embeddings.is_floating_point():
        return (
            f"prompt embeddings of {embeddings.dtype}{list(embeddings.shape)}; this prompt needs"
            f" floating-point numbers, {list(wanted)}"
        )
    mask = inputs.token_positions
    if inputs.features or (mask is not None and len(mask) != tokens):
        return "prompt embeddings with features, or with a mask of another length"
    return ""


def _wrong_features(
    features: Sequence[MultiModalFeatureSpec], tokens: int, limits: Mapping[str, int]
) -> str:
    if not features:
        return "neither features nor embeddings"
    start = 0
    for feature in features:
        place = feature.mm_position
        if not (start <= place.offset and 0 < place.length <= tokens - place.offset):
            return (
                f"{feature.modality} at {place.offset} to {place.offset + place.length} of {tokens}"
            )
        if place.is_embed is not None and tuple(place.is_embed.shape) != (place.length,):
            return f"{feature.modality} at {place.offset}: a mask of another length"
        if not feature.data:
            return f"{feature.modality} at {place.offset} without data"
        most = limits.get(feature.modality, 0)
        if (embeds := place.get_num_embeds()) > most:
            return (
                f"{feature.modality} of {embeds} embeddings; this worker's engine takes at most"
                f" {most}: give Frontend and workers the same multimodal arguments"
            )
        start = place.offset  # media of two kinds may share one place
    return ""

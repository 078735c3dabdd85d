"""What two engines must have in common before one writes KV to the other."""

import json
import platform
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import PurePath
from typing import Any

from vllm import __version__ as vllm_version
from vllm.config import ModelConfig, VllmConfig

from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.transfer.sharding import join
from dynamo_lite.vllm.engine.weights import weights_print

#: Entries that may differ if both engines' regions tell where the bytes of each token are.
_OF_BLOCKS = {"block_size", "kv_layout"}

#: Keys of a model's configuration, at any depth, that tell where it was found or what wrote it,
#: or that have an entry of their own in the fingerprint.
_NOT_THE_MODEL = {
    "_name_or_path",
    "_commit_hash",
    "_attn_implementation",
    "transformers_version",
    "auto_map",
    "dtype",
    "torch_dtype",
}


def fingerprint(
    config: VllmConfig, of_ranks: Mapping[str, str], *, max_model_len: int | None = None
) -> dict[str, str]:
    """Returns readable `name: value` pairs of a running engine.

    of_ranks: the entries that come from its ranks. max_model_len: the length with which the
    model was loaded, if vLLM has reduced it later to fit the memory. Models choose factors by
    it (longrope's, Llama 4's attention temperature).

    The number of ranks is not included: the ranks' regions describe it.

    The model is named by the last part of its path, because its folder may differ between
    hosts.
    """
    model, cache = config.model_config, config.cache_config
    return {
        "model": PurePath(model.model).name,
        "revision": str(model.revision or ""),
        "config": _config_print(model),
        "max_model_len": str(max_model_len or model.max_model_len),
        "quantization": _quantization(model),
        "weights": weights_print(config.model_config, config.load_config),
        "speculation": _speculation(config),
        "lora": _lora(config),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": str(cache.block_size),
        # With a sliding window in all layers vLLM frees blocks before it. A prefill engine with
        # smaller blocks would free the beginning of one that it still has to write.
        "window_block_size": str(cache.block_size if cache.sliding_window else ""),
        "machine": platform.machine(),
        "vllm": vllm_version,
        **of_ranks,
    }


def _config_print(model: ModelConfig) -> str:
    """A hash of the model's configuration with its overrides: `hf-overrides`, and
    `override-generation-config`, by which Llama 4 chooses its attention temperature."""
    parts = [model.hf_config.to_dict(), model.override_generation_config]
    text = json.dumps(_of_the_model(parts), sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _of_the_model(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {str(key): item for key, item in value.items() if key not in _NOT_THE_MODEL}
        return {key: _of_the_model(item) for key, item in kept.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return [_of_the_model(item) for item in value] if isinstance(value, list | tuple) else value


def _lora(config: VllmConfig) -> str:
    """How adapters are computed; "" without them. Adapters themselves are compared per job."""
    lora = config.lora_config
    if lora is None:
        return ""
    factors = {
        "max_lora_rank": lora.max_lora_rank,
        "lora_dtype": str(lora.lora_dtype),
        "fully_sharded_loras": lora.fully_sharded_loras,
        "target_modules": sorted(lora.target_modules or ()),
    }
    return json.dumps(factors)


def _speculation(config: VllmConfig) -> str:
    """The draft that keeps KV in the engine's blocks; "" for drafts without KV (ngram, suffix).

    As in vLLM's NIXL connector (`_get_speculative_compatibility_factors`), and the draft's weights.
    """
    drafts = config.speculative_config
    if drafts is None or not drafts.uses_draft_kv_cache():
        return ""
    model = drafts.draft_model_config
    assert model is not None
    factors = {
        "method": drafts.method,
        "model": PurePath(model.model).name,
        "revision": model.revision,
        "code_revision": model.code_revision,
        "config": _config_print(model),
        "parallel_drafting": drafts.parallel_drafting,
        "kv_cache_dtype": str(drafts.kv_cache_dtype or config.cache_config.cache_dtype),
        "weights": weights_print(model, drafts.draft_load_config or config.load_config),
    }
    return json.dumps(factors, sort_keys=True)


def _quantization(model: ModelConfig) -> str:
    """How vLLM quantises the weights while it loads them.

    For weights that are already quantised, the model's configuration describes it. The
    kernels that use them depend on the device, and may differ.
    """
    own = model.model_arch_config.quantization_config is not None
    method = "the model's own" if own else model.quantization
    parts = (method, model.quantization_config)
    return " ".join(str(part) for part in parts if part is not None)


def check_peer(own: EngineMetadata, peer: EngineMetadata) -> bool:
    """Returns whether blocks are equal on both sides, so that they can also be read.

    If not, they have to be converted for the peer. Raises IncompatiblePeer with both values of
    every difference. own: the prefill engine. peer: the decode engine that it writes to.
    """
    differences = {
        name: f"{name}: {mine!r} here, {theirs!r} there"
        for name in sorted({*own.fingerprint, *peer.fingerprint})
        if (mine := own.fingerprint.get(name)) != (theirs := peer.fingerprint.get(name))
    }
    if differences.keys() - _OF_BLOCKS:
        raise IncompatiblePeer(peer.engine_id, "; ".join(differences.values()))
    regions = [region for engine in (own, peer) for rank in engine.ranks for region in rank.regions]
    unknown = next((region.layer for region in regions if not region.arrays), None)
    if differences and unknown is not None:
        raise IncompatiblePeer(
            peer.engine_id,
            f"{'; '.join(differences.values())}; and where layer {unknown} has the bytes of each"
            " token in a block is not known on both sides, so that they cannot be rearranged",
        )
    try:
        lanes = join(peer.engine_id, own.ranks, peer.ranks)
    except IncompatiblePeer as exc:
        raise IncompatiblePeer(
            peer.engine_id, "; ".join([*differences.values(), exc.detail])
        ) from exc
    return not any(lane.staged for mine in lanes.values() for lane in mine)

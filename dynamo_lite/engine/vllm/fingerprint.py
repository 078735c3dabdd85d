"""What two engines must have in common before one writes KV into the other."""

import platform
from collections.abc import Mapping
from pathlib import PurePath

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from dynamo_lite.engine.vllm.block_arrays import cpu_isa
from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.transfer.sharding import join

#: What may differ where both engines' regions say where the bytes of each token are.
_OF_BLOCKS = {"block_size", "kv_layout", "attention"}


def fingerprint(config: VllmConfig, kv_layout: str) -> dict[str, str]:
    """Readable `name: value` pairs. kv_layout: order of the bytes inside a block.

    Over how many ranks an engine spreads its heads and layers is not among them: its
    ranks' regions say that.

    The model is named by the last part of its path, because two hosts may keep
    it in different places.
    """
    model = config.model_config
    text = model.hf_text_config
    return {
        "model": PurePath(model.model).name,
        "revision": str(model.revision or ""),
        "architecture": ",".join(model.architectures or ()),
        "layers": str(getattr(text, "num_hidden_layers", "")),
        "kv_heads": str(model.get_total_num_kv_heads()),
        "head_size": str(model.get_head_size()),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "block_size": str(config.cache_config.block_size),
        "kv_layout": kv_layout,
        "machine": platform.machine(),
        "attention": _attention(config),
        "vllm": vllm_version,
    }


def _attention(config: VllmConfig) -> str:
    """What decides how the attention kernels pack the bytes of a block.

    On a CPU that is the instruction set; shapes and strides do not show it.
    """
    if current_platform.is_cpu():
        return cpu_isa(config, config.model_config.get_head_size())
    return str(config.attention_config.backend)


def check_peer(own: EngineMetadata, peer: EngineMetadata) -> bool:
    """Whether blocks are the same on both sides, so that they can be read as well.

    If not, they are laid out anew for the peer. Raises IncompatiblePeer, naming every
    difference with both values.
    own: the prefill engine, peer: the decode engine that it would write into.
    """
    differences = {
        name: f"{name}: {mine!r} here, {theirs!r} there"
        for name, mine, theirs in _pairs(own.fingerprint, peer.fingerprint)
        if mine != theirs
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


def _pairs(
    own: Mapping[str, str], peer: Mapping[str, str]
) -> list[tuple[str, str | None, str | None]]:
    return [(name, own.get(name), peer.get(name)) for name in sorted({*own, *peer})]

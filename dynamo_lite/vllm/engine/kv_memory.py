"""Registers one rank's KV tensors as memory for transfers, and describes their layout."""

from collections.abc import Iterable, Mapping

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.layout import block_order, region_of_tensor
from dynamo_lite.vllm.engine.block_arrays import block_arrays, packing
from dynamo_lite.vllm.engine.kv_groups import specs_of

#: vLLM views every attention layer's KV as [blocks, heads, tokens, values of a token].
_HEADS_DIM, _DIMENSIONS = 1, 4
#: Tokens per block that every attention kernel on CUDA takes without splitting the block.
_KERNEL_BLOCKS = (16, 32, 64)


def rank_index(config: VllmConfig) -> int:
    """Returns this process's index among its engine's ranks: by pipeline stage, then within it."""
    each = config.parallel_config.tensor_parallel_size
    return get_pp_group().rank_in_group * each + get_tensor_model_parallel_rank()


def preferred_layout(config: VllmConfig) -> str | None:
    """Returns the KV layout that transfers best; None if vLLM's default is right.

    Heads are outermost in a block, so that blocks can be cut by heads. On CUDA all layers of a
    block are together, so that a block is one descriptor; but then vLLM cannot split blocks
    for kernels that need smaller ones. vLLM ignores the preference if the attention backend
    has no such layout.
    """
    if config.model_config is None or config.model_config.use_mla:
        return None
    together = current_platform.is_cuda() and config.cache_config.block_size in _KERNEL_BLOCKS
    return (KVCacheLayout.BLHNC if together else KVCacheLayout.LBHNC).name


def register(
    kv_caches: Mapping[str, torch.Tensor],
    mover: Mover,
    config: VllmConfig,
    kv_config: KVCacheConfig,
) -> tuple[RankMetadata, frozenset[str]]:
    """Returns the rank's memory, and the layouts of its layers' blocks: their orders of bytes, and
    how their kernels pack them. Raises ValueError with the layer's name for a layout that is not
    supported.

    Layers that share KV have the same tensor, which is registered once. Those of different groups
    may lie at the same address, too: each has blocks of its own there.
    """
    specs, rank_in_stage = specs_of(kv_config), get_tensor_model_parallel_rank()
    tokens = config.cache_config.block_size
    regions: list[KvRegion] = []
    layouts: set[str] = set()
    taken: set[tuple[int | None, int]] = set()
    for layer, tensor in kv_caches.items():
        group, spec = specs.get(layer, (0, None))
        # vLLM does not name the group of a layer that uses another one's KV.
        at = tensor.data_ptr()
        if (group if spec else None, at) in taken:
            continue
        taken |= {(group, at), (None, at)}
        heads_dim, first, arrays = None, 0, ()
        if tensor.dim() == _DIMENSIONS:
            heads_dim, heads = _HEADS_DIM, tensor.shape[_HEADS_DIM]
            first = first_head(layer, heads, spec, config, rank_in_stage)
            if not isinstance(spec, MambaSpec):
                arrays = block_arrays(layer, tensor, config, tokens)
        region = region_of_tensor(
            layer,
            address=tensor.data_ptr(),
            shape=tensor.shape,
            strides_bytes=[s * tensor.element_size() for s in tensor.stride()],
            item_bytes=tensor.element_size(),
            num_blocks=kv_config.num_blocks,
            heads_dim=heads_dim,
            first_head=first,
            tokens=tokens,
            arrays=arrays,
            group=group,
        )
        regions.append(region)
        order = block_order(tensor.shape, tensor.stride(), kv_config.num_blocks, heads_dim)
        layouts.add(f"{packing(layer, config)} {order}".lstrip())
    tensors = list(kv_caches.values())
    memory = "DRAM" if tensors[0].device.type == "cpu" else "VRAM"
    device = tensors[0].device.index or 0
    spans = [(storage.data_ptr(), storage.nbytes()) for storage in storages_of(tensors)]
    mover.register(sorted(spans), memory, device)
    agent = mover.metadata()
    rank = RankMetadata(agent=agent, memory=memory, device=device, regions=tuple(regions))
    return rank, frozenset(layouts)


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory in which they are, each once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return list({storage.data_ptr(): storage for storage in found}.values())


def first_head(
    layer: str, heads: int, spec: KVCacheSpec | None, config: VllmConfig, rank: int
) -> int:
    """Returns the model's index of the first of a layer's `heads` on a tensor-parallel rank.

    vLLM gives consecutive heads to consecutive ranks; with more ranks than heads, neighbours
    hold the same one. A state is split between all ranks. Raises ValueError if the index is not
    known.
    """
    parallel, model = config.parallel_config, config.model_config
    ranks = parallel.tensor_parallel_size
    if ranks == 1:
        return 0
    if isinstance(spec, MambaSpec):
        return 0 if spec.tp_replicated else rank
    shards = spec.max_tp_shards if isinstance(spec, AttentionSpec) else None
    if shards is None:
        if heads != model.get_num_kv_heads(parallel):
            raise ValueError(
                f"layer {layer}: {heads} KV heads per rank, other layers have"
                f" {model.get_num_kv_heads(parallel)}: with tensor-parallel-size {ranks} it is"
                " not known which of the model's heads these are"
            )
        shards = min(ranks, model.get_total_num_kv_heads())
    return rank // max(1, ranks // shards) * heads

"""Where attention kernels keep the bytes of each token in a block.

Shapes and strides show this only if the kernel indexes its cache by them; such backends are
listed here. Blocks of all other backends can only be transferred to equal ones.
"""

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from dynamo_lite.protocol.records import KvArray
from dynamo_lite.transfer.layout import plain_array

#: Backends that index [block, head, token, K and V] by the strides of the cache.
_PLAIN_BACKENDS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"}
#: Cache types whose blocks contain nothing but one value per element.
_PLAIN_DTYPES = {"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}

#: AMX packs this many tokens and values per tile.
_AMX_K_TOKENS, _AMX_V_TOKENS, _AMX_V_VALUES = 16, 2, 16


def cpu_isa(config: VllmConfig, head_size: int) -> str:
    """Returns the instruction set for which the CPU's attention packs its cache."""
    cache = config.cache_config
    return _get_attn_isa(config.model_config.dtype, cache.block_size, head_size, cache.cache_dtype)


def packing(layer: str, config: VllmConfig) -> str:
    """Returns what determines how a layer's attention kernel packs the bytes of a block; "" if the
    layer is not known.

    It is the backend that vLLM has chosen. On a CPU it is also the instruction set; shapes and
    strides do not show it.
    """
    attention = config.compilation_config.static_forward_context.get(layer)
    backend = "" if attention is None else attention.get_attn_backend().get_name()
    if backend == "CPU_ATTN":
        return f"{backend} {cpu_isa(config, config.model_config.get_head_size())}"
    return backend


def block_arrays(
    layer: str, tensor: torch.Tensor, config: VllmConfig, tokens: int
) -> tuple[KvArray, ...]:
    """Returns the arrays in a block of a layer's cache; empty if they are not known.

    tensor: [blocks, heads, tokens, K and V]. tokens: per block.
    """
    attention = config.compilation_config.static_forward_context.get(layer)
    if attention is None or tensor.shape[2] != tokens:
        return ()
    if config.cache_config.cache_dtype not in _PLAIN_DTYPES:
        return ()
    backend = attention.get_attn_backend().get_name()
    size = tensor.element_size()
    if backend == "CPU_ATTN":
        if not tensor[0].is_contiguous():
            return ()
        head_size = tensor.shape[3] // 2
        return cpu_arrays(cpu_isa(config, head_size), tokens, head_size, size)
    if backend not in _PLAIN_BACKENDS:
        return ()
    strides = [stride * size for stride in tensor.stride()]
    plain = plain_array(tensor.shape, strides, size)
    return () if plain is None else (plain,)


def cpu_arrays(isa: str, tokens: int, head_size: int, value_bytes: int) -> tuple[KvArray, ...]:
    """Returns the arrays of K and V in a block of the CPU's attention; empty if not known.

    Each head has K, then V. Without tiles, K is [values, tokens] and V [tokens, values]; for
    AMX, K is [tokens / 16, values / 2, 16, 2] and V [values / 16, tokens / 2, 16, 2].
    """
    half = tokens * head_size * value_bytes
    if isa in ("vec", "vec16"):
        k = (tokens * value_bytes, value_bytes, 1, head_size, value_bytes)
        v = (0, head_size * value_bytes, 1, 1, head_size * value_bytes)
    elif isa == "amx":
        tile = _AMX_K_TOKENS * head_size * value_bytes
        k = (0, tile, _AMX_K_TOKENS, 1, tile)
        pair = _AMX_V_TOKENS * _AMX_V_VALUES * value_bytes
        v = (
            tokens * _AMX_V_VALUES * value_bytes,
            pair,
            _AMX_V_TOKENS,
            head_size // _AMX_V_VALUES,
            pair,
        )
    else:
        return ()
    return tuple(
        KvArray(
            offset=offset,
            head_stride=2 * half,
            item_stride=item_stride,
            group_stride=group_stride,
            group_tokens=group_tokens,
            items=items,
            item_bytes=item_bytes,
        )
        for offset, (item_stride, group_stride, group_tokens, items, item_bytes) in (
            (0, k),
            (half, v),
        )
    )

"""The KV groups of a model, each with its own table of blocks, and a request's blocks in each.

Attention layers keep the KV of a block's tokens in a block. Layers with a state (Mamba, linear
attention) keep one state for all tokens so far, in the last block of their table.
"""

import json
from collections.abc import Sequence

from vllm import envs
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from dynamo_lite.protocol.prefill import NULL_BLOCK


def specs_of(config: KVCacheConfig) -> dict[str, tuple[int, KVCacheSpec]]:
    """Returns the group and the specification of each layer's KV, by layer."""
    found: dict[str, tuple[int, KVCacheSpec]] = {}
    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        for layer in group.layer_names:
            found[layer] = number, each.get(layer, spec)
    return found


def groups_print(config: KVCacheConfig) -> str:
    """What must be equal on both sides; "" for a model with one group."""
    kinds = _kinds(config)
    return json.dumps([_described(spec) for spec in kinds]) if len(kinds) > 1 else ""


def _kinds(config: KVCacheConfig) -> list[KVCacheSpec]:
    """One specification of each group; those of a group differ in sizes only. A stage of a pipeline
    may have none of its layers."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return [
        next(iter(spec.kv_cache_specs.values()))
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else spec
        for spec in specs
    ]


def _described(spec: KVCacheSpec) -> list[str]:
    described = [type(spec).__name__]
    if isinstance(spec, SlidingWindowSpec):
        described.append(str(spec.sliding_window))
    if isinstance(spec, MambaSpec):
        described += map(str, (spec.mamba_type.name, spec.shapes, spec.dtypes))
        described.append(str(envs.VLLM_SSM_CONV_STATE_LAYOUT))
    return described


def groups_with_a_state(config: KVCacheConfig) -> list[int]:
    """The numbers of the KV groups with a state."""
    return [n for n, spec in enumerate(_kinds(config)) if isinstance(spec, MambaSpec)]


def with_states(
    tables: Sequence[Sequence[int]], groups: Sequence[int], count: int
) -> Sequence[Sequence[int]]:
    """A request's tables for its first `count` blocks.

    In the table of a state, it is the last block, and the others are null. groups: of
    `groups_with_a_state`.
    """
    return [
        _state_table(table, count) if number in groups else table
        for number, table in enumerate(tables)
    ]


def _state_table(table: Sequence[int], count: int) -> list[int]:
    state = next((block for block in reversed(table) if block != NULL_BLOCK), NULL_BLOCK)
    return [*[NULL_BLOCK] * (count - 1), state]

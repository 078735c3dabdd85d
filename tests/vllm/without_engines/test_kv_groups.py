"""vLLM's KV groups: a request's blocks in each, and their memory."""

from typing import Any, cast

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from dynamo_lite.vllm.engine import kv_memory
from dynamo_lite.vllm.engine.kv_groups import groups_print, groups_with_a_state, with_states
from dynamo_lite.vllm.engine.kv_memory import first_head, register
from tests.twins.mover import MemoryFabric, MemoryMover
from tests.vllm.without_engines.test_kv_memory import config

SHAPE: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=128)
STATE = MambaSpec(block_size=32, shapes=((2, 4),), dtypes=(torch.float32,))


def kv(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_attention_groups_have_vllm_s_own_tables():
    assert groups_with_a_state(kv(FULL, WINDOW)) == []


@pytest.mark.parametrize("state", [[7], [0, 0, 7], [0, 6, 7]], ids=["none", "align", "two"])
def test_a_state_is_in_the_last_block(state):
    """With vLLM's prefix cache a state has a block by its position, without it only one."""
    groups = groups_with_a_state(kv(FULL, STATE))
    assert with_states(([1, 2, 3], state), groups, 3) == [[1, 2, 3], [0, 0, 7]]


def test_groups_are_compared_by_kind_window_and_state(monkeypatch: pytest.MonkeyPatch):
    longer = SlidingWindowSpec(**SHAPE, sliding_window=256)
    other = MambaSpec(block_size=32, shapes=((2, 4),), dtypes=(torch.bfloat16,))
    pairs = [(FULL, WINDOW), (FULL, longer), (WINDOW, FULL), (FULL, STATE), (FULL, other)]
    prints = [groups_print(kv(*pair)) for pair in pairs]
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    prints.append(groups_print(kv(FULL, STATE)))
    assert len(set(prints)) == len(prints)
    assert groups_print(kv(FULL)) == ""


def test_each_rank_has_a_part_of_a_state_of_its_own():
    found = [first_head("0", 1, STATE, config(4, 8), rank) for rank in range(4)]
    assert found == [0, 1, 2, 3]


def test_layers_of_different_groups_at_one_address_are_all_registered(
    monkeypatch: pytest.MonkeyPatch,
):
    """vLLM lays the layers of a group over those of the others. A layer that shares its KV with
    one of its own group is the same memory."""
    monkeypatch.setattr(kv_memory, "get_tensor_model_parallel_rank", lambda: 0)
    attention = torch.zeros((8, 2, 32, 64), dtype=torch.bfloat16)
    state = attention.view(torch.int8).view(8, 1, 1, -1)[..., :32]
    groups = [
        KVCacheGroupSpec(["full", "shared"], FULL),
        KVCacheGroupSpec(["window"], WINDOW),
        KVCacheGroupSpec(["state"], STATE),
    ]
    tensors = {"full": attention, "shared": attention, "window": attention, "state": state}
    tensors["unnamed"] = attention  # uses another layer's KV
    mover = cast("Any", MemoryMover(MemoryFabric(), "rank"))
    rank, _ = register(tensors, mover, config(1, 2), KVCacheConfig(8, [], groups))
    assert [(region.layer, region.group) for region in rank.regions] == [
        ("full", 0),
        ("window", 1),
        ("state", 2),
    ]
    assert {region.base for region in rank.regions} == {attention.data_ptr()}
    assert (rank.regions[2].block_bytes, rank.regions[2].head_bytes) == (32, 32)
    assert rank.regions[2].stride_bytes == rank.regions[0].stride_bytes

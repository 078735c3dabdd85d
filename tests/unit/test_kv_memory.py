"""Which KV heads a rank holds, said as vLLM spreads them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dynamo_lite.engine.vllm.kv_memory import first_head


def config(ranks: int, total: int) -> Any:
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: total,
        get_num_kv_heads=lambda _: max(1, total // ranks),
    )
    parallel = SimpleNamespace(tensor_parallel_size=ranks)
    return cast("Any", SimpleNamespace(model_config=model, parallel_config=parallel))


def spec(heads: int, shards: int | None = None) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=32, num_kv_heads=heads, head_size=64, dtype=torch.float32, max_tp_shards=shards
    )


@pytest.mark.parametrize(
    ("total", "ranks", "expected"),
    [
        (4, 1, [0]),
        (4, 2, [0, 2]),
        (4, 4, [0, 1, 2, 3]),
        (2, 4, [0, 0, 1, 1]),
        (1, 4, [0, 0, 0, 0]),
        (2, 8, [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_heads_are_split_and_then_repeated(total, ranks, expected):
    heads = max(1, total // ranks)
    found = [
        first_head("0", heads, spec(heads), config(ranks, total), rank) for rank in range(ranks)
    ]
    assert found == expected


def test_a_cache_that_is_not_split_is_the_same_on_all_ranks():
    """As MLA's: one latent vector for all of the model's heads."""
    found = [first_head("0", 1, spec(1, shards=1), config(4, 128), rank) for rank in range(4)]
    assert found == [0, 0, 0, 0]


def test_a_layer_with_heads_of_its_own_number_is_refused_over_several_ranks():
    assert first_head("odd", 8, None, config(1, 4), 0) == 0
    with pytest.raises(ValueError, match="layer odd: 8 KV heads per rank, other layers have 2"):
        first_head("odd", 8, None, config(2, 4), 1)

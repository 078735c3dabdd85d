"""A rank's KV tensors as regions: which heads, as vLLM spreads them, and which bytes."""

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from dynamo_lite.protocol.codec import encode
from dynamo_lite.vllm.engine import kv_memory
from dynamo_lite.vllm.engine.kv_memory import first_head, register
from dynamo_lite.vllm.engine.opened_rank import RankHandshake
from dynamo_lite.vllm.engine.opened_scheduler import engine_metadata
from tests.twins.mover import MemoryFabric, MemoryMover


def config(ranks: int, total: int, layers: Any = None) -> Any:
    """layers: attention layers, which say how their kernel packs a block."""
    each = max(1, total // ranks)
    made: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: total, get_num_kv_heads=lambda _: each
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        cache_config=SimpleNamespace(block_size=32, cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
    )
    return made


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


BLOCKS, HEADS, TOKENS, VALUES = 5, 3, 32, 64


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_memory, "get_tensor_model_parallel_rank", lambda: 0)

    def take(tensors: dict[str, torch.Tensor], heads: int, layers: Any = None) -> Any:
        group = KVCacheGroupSpec(list(tensors), spec(heads))
        kv_config = KVCacheConfig(BLOCKS, [], [group])
        mover = cast("Any", MemoryMover(MemoryFabric(), "rank"))
        return register(tensors, mover, config(1, heads, layers), kv_config)

    return take


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every byte at random."""
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8)
    return raw.view(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bfloat16, torch.float32]
)
def test_heads_are_found_by_their_bytes_whatever_a_value_takes(registered, dtype):
    """Quantised KV has values of one byte."""
    tensor = filled((BLOCKS, HEADS, TOKENS, VALUES), dtype)
    kv, _ = registered({"layer": tensor}, HEADS)
    [region] = kv.regions
    assert region.block_bytes == tensor[0].numel() * tensor.element_size()
    for block in range(BLOCKS):
        start = region.base + block * region.stride_bytes
        assert ctypes.string_at(start, region.block_bytes) == raw(tensor[block])
        for head in range(HEADS):
            at = start + head * region.head_bytes
            assert ctypes.string_at(at, region.head_bytes) == raw(tensor[block, head])


def test_an_engine_names_the_attention_backend_that_vllm_has_chosen(registered):
    """None is configured: another engine's GPU can have led to another."""
    backend = SimpleNamespace(get_name=lambda: "TRITON_MLA")
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    tensor = filled((BLOCKS, 16, 576), torch.bfloat16)
    kv, layouts = registered({"layer": tensor}, 1, {"layer": layer})
    own = cast("Any", SimpleNamespace(engine_id="e", lease_id=1))
    shakes = [RankHandshake(encode(kv), layouts)] * 2
    kv_config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec(1))])
    metadata = engine_metadata(own, TOKENS, kv_config, shakes)
    assert metadata.fingerprint["kv_groups"] == ""
    assert metadata.fingerprint["kv_layout"] == "TRITON_MLA [16, 576]/[576, 1]"


def test_latent_kv_has_no_heads(registered):
    """As MLA's: tokens of one vector each, the same on all ranks."""
    tensor = filled((BLOCKS, 16, 576), torch.bfloat16)
    kv, _ = registered({"layer": tensor}, 1)
    [region] = kv.regions
    assert (region.block_bytes, region.head_bytes) == (16 * 576 * 2, 0)
    third = region.base + 2 * region.stride_bytes
    assert ctypes.string_at(third, region.block_bytes) == raw(tensor[2])


def test_layers_that_share_their_kv_are_written_once(registered):
    first, second = (filled((BLOCKS, HEADS, TOKENS, VALUES), torch.bfloat16) for _ in range(2))
    kv, _ = registered({"0": first, "1": second, "2": first, "3": second}, HEADS)
    assert [region.layer for region in kv.regions] == ["0", "1"]


def view_of(raw: torch.Tensor, layout: KVCacheLayout, heads: int, kernel_tokens: int):
    """As vLLM makes it for an attention kernel whose blocks have `kernel_tokens`."""
    page = spec(heads).page_size_bytes
    place = KVCacheTensor(
        size=raw.numel(), layers=["l"], layer_stride=raw.numel(), block_stride=page
    )
    [view] = create_kv_cache_views(
        raw, spec(heads), BLOCKS, layout, place, kernel_block_size=kernel_tokens
    )
    return view


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("kernel_tokens", [8, 16])
def test_the_blocks_of_a_kernel_are_grouped_into_those_of_the_manager(
    registered, layout: KVCacheLayout, heads: int, kernel_tokens: int
):
    page, each = spec(heads).page_size_bytes, TOKENS // kernel_tokens
    raw_kv = torch.arange(BLOCKS * page // 4, dtype=torch.float32).view(torch.int8)
    view = view_of(raw_kv, layout, heads, kernel_tokens)
    assert view.shape[0] == BLOCKS * each
    kv, layouts = registered({"l": view}, heads)
    [region] = kv.regions
    assert (region.base, region.stride_bytes, region.block_bytes) == (view.data_ptr(), page, page)
    whole = raw_kv.view(torch.float32).view(BLOCKS, -1)
    for block in range(BLOCKS):
        # So does vLLM's block table map them.
        of_kernel = view[block * each : (block + 1) * each]
        assert set(of_kernel.flatten().tolist()) == set(whole[block].tolist())
    _, unsplit = registered({"l": view_of(raw_kv, layout, heads, TOKENS)}, heads)
    same_order = layout is KVCacheLayout.LBNHC or heads == 1
    assert (layouts == unsplit) is same_order
    # Its heads can be cut out of a block only where each lies in one piece.
    assert (region.head_bytes > 0) is (heads == 1)


def test_kernel_blocks_that_do_not_add_up_are_refused(registered):
    tensor = filled((BLOCKS * 2, HEADS, TOKENS, VALUES), torch.bfloat16)
    with pytest.raises(
        ValueError, match="2 kernel blocks of 32 tokens are not a block of 32 tokens"
    ):
        registered({"layer": tensor}, HEADS)

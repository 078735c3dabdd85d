"""What is said of a block's bytes, against vLLM's own kernels that pack them."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.transfer.sharding import join
from dynamo_lite.transfer.transpose import slot_layout, units_of
from dynamo_lite.vllm.engine.block_arrays import block_arrays, cpu_arrays, cpu_isa
from dynamo_lite.vllm.engine.transposer import TorchTransposer

current_platform.import_kernels()

#: vLLM's kernel for amx exists only on processors that have it.
ISAS = ["vec", "amx"] if torch.cpu._is_amx_tile_supported() else ["vec"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("here", "there"), [(32, 64), (64, 32)])
def test_what_vllm_s_cpu_kernel_has_packed_is_as_if_it_had_packed_it_there(isa, here, there):
    heads, head_size, tokens = 2, 64, 128
    key, value = (torch.randn(tokens, heads, head_size).to(torch.bfloat16) for _ in range(2))

    def packed(size: int) -> torch.Tensor:
        cache = torch.zeros(tokens // size, heads, size * 2, head_size, dtype=torch.bfloat16)
        k, v = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, k, v, torch.arange(tokens), isa)
        return cache

    def region(cache: torch.Tensor, size: int) -> RankMetadata:
        head = size * 2 * head_size * 2
        region = KvRegion(
            layer="0",
            base=cache.data_ptr(),
            stride_bytes=heads * head,
            block_bytes=heads * head,
            head_bytes=head,
            tokens=size,
            arrays=cpu_arrays(isa, size, head_size, 2),
        )
        return RankMetadata(agent=b"", memory="DRAM", device=0, regions=(region,))

    ours, theirs = packed(here), packed(there)
    lanes = join("d", [region(ours, here)], [region(theirs, there)])[0, 0]
    layout = slot_layout(lanes, theirs.nbytes)
    transposer = TorchTransposer([ours.untyped_storage()], theirs.nbytes)
    units = units_of(layout, range(tokens // here), 0, tokens // there)
    assert transposer.transpose(layout, units, 0)()
    staged = ctypes.string_at(transposer.address, theirs.nbytes)
    assert staged == theirs.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_kernel_s_unknown_packing_is_not_guessed():
    assert cpu_arrays("neon", 32, 64, 2) == ()


def config(cache_dtype: str, backend: str) -> Any:
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=32),
        compilation_config=SimpleNamespace(static_forward_context={"0": layer}),
    )


def test_backends_that_go_by_strides_are_described_by_them():
    cache = torch.zeros(3, 32, 4, 128, dtype=torch.bfloat16).transpose(1, 2)
    [array] = block_arrays("0", cache, config("auto", "FLASH_ATTN"), 32)
    assert (array.head_stride, array.group_stride, array.item_bytes) == (256, 1024, 256)


@pytest.mark.parametrize(
    ("cache_dtype", "backend", "layer", "tokens"),
    [
        ("auto", "TURBOQUANT", "0", 32),
        ("nvfp4", "FLASHINFER", "0", 32),
        ("auto", "FLASH_ATTN", "1", 32),
        ("auto", "FLASH_ATTN", "0", 64),
    ],
)
def test_what_is_not_known_is_left_open(cache_dtype, backend, layer, tokens):
    cache = torch.zeros(3, 4, 32, 128, dtype=torch.bfloat16)
    assert block_arrays(layer, cache, config(cache_dtype, backend), tokens) == ()


def test_the_cpu_s_cache_is_described_by_its_instruction_set():
    cache = torch.zeros(3, 4, 32, 128, dtype=torch.bfloat16)
    made = config("auto", "CPU_ATTN")
    assert block_arrays("0", cache, made, 32) == cpu_arrays(cpu_isa(made, 64), 32, 64, 2) != ()

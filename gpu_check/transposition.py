"""Part `transposition`: copies within one device."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.transfer.sharding import join
from dynamo_lite.transfer.transpose import slot_layout, units_of
from dynamo_lite.vllm.engine.transposer import TorchTransposer
from gpu_check.bench import Bench
from gpu_check.memory import region
from gpu_check.report import CheckFailed, Figures

_LAYERS, _HEADS, _VALUES = 3, 4, 128
_SLOT_BYTES = 8 << 20


@dataclass(frozen=True)
class _Case:
    """Layouts of both sides: tokens per block, and whether heads are outermost in a block."""

    here: tuple[int, bool]
    there: tuple[int, bool]
    dtype: torch.dtype


_CASES = [
    _Case((16, True), (32, True), torch.int16),
    _Case((32, True), (16, False), torch.int16),
    _Case((16, False), (48, True), torch.int16),
    _Case((64, True), (64, False), torch.uint8),
    _Case((16, True), (64, False), torch.int32),
]


def transposition(bench: Bench) -> Figures:
    """The result must have the bytes of a plain copy of the tokens on the host."""
    seconds: list[float] = []
    for case in _CASES:
        found, expected, took_s = _transposed(case, bench)
        if found != expected:
            wrong = sum(a != b for a, b in zip(found, expected, strict=True))
            raise CheckFailed(f"{case}: {wrong} of {len(expected)} bytes are wrong")
        seconds.append(took_s)
    return {"cases": len(_CASES), "best ms": min(seconds) * 1e3}


def _transposed(case: _Case, bench: Bench) -> tuple[bytes, bytes, float]:
    """Resulting bytes, expected bytes, seconds."""
    device, rng = torch.device(bench.here), random.Random(repr(case))
    blocks = 24
    pool = [_layer(case.here, case.dtype, blocks, device) for _ in range(_LAYERS)]
    target = [_layer(case.there, case.dtype, blocks, torch.device("cpu")) for _ in range(_LAYERS)]
    for tensor in pool:
        raw = torch.randint(0, 256, (tensor.untyped_storage().nbytes(),), dtype=torch.uint8)
        torch.empty(0, dtype=torch.uint8, device=device).set_(tensor.untyped_storage()).copy_(raw)
    # Only the layout of the target's blocks is used, not their addresses.
    mappings = join("peer", [_rank(pool)], [_rank(target)])[0, 0]
    layout = slot_layout(mappings, _SLOT_BYTES)
    local_ids = rng.sample(range(blocks), 7)
    tokens, skip = len(local_ids) * case.here[0], 0
    count = -(-tokens // case.there[0])
    units = units_of(layout, local_ids, skip, count)
    expected = b"".join(_by_hand(tensor, local_ids, case.there, count) for tensor in pool)
    transposer = TorchTransposer([t.untyped_storage() for t in pool], _SLOT_BYTES)
    took_s = 0.0
    for _ in range(2):  # the first one loads torch's kernels
        _wait(device)
        started = time.perf_counter()
        filled = transposer.transpose(layout, units, 0)
        while not filled():
            pass
        took_s = time.perf_counter() - started
    staged = transposer._staging.cpu().numpy()
    slices = [slice(r.base, r.base + count * r.block_bytes) for r in layout.regions]
    return b"".join(staged[part].tobytes() for part in slices), expected, took_s


def _layer(
    order: tuple[int, bool], dtype: torch.dtype, blocks: int, device: torch.device
) -> torch.Tensor:
    """Zeros with shape [blocks, heads, tokens, values], in the given order in memory."""
    tokens, heads_first = order
    inner = (_HEADS, tokens) if heads_first else (tokens, _HEADS)
    memory = torch.zeros((blocks, *inner, _VALUES), dtype=dtype, device=device)
    return memory if heads_first else memory.transpose(1, 2)


def _rank(layers: Sequence[torch.Tensor]) -> RankMetadata:
    return RankMetadata(
        agent=b"",
        memory="DRAM",
        device=0,
        regions=tuple(region(f"layer {number}", tensor) for number, tensor in enumerate(layers)),
    )


def _by_hand(
    tensor: torch.Tensor, local_ids: Sequence[int], there: tuple[int, bool], count: int
) -> bytes:
    """The peer's blocks of these tokens in sequence, padded with zeros."""
    size, heads_first = there
    by_token = tensor.cpu()[list(local_ids)].transpose(1, 2).reshape(-1, _HEADS, _VALUES)
    missing = by_token.new_zeros((count * size - len(by_token), _HEADS, _VALUES))
    blocks = torch.cat([by_token, missing]).reshape(count, size, _HEADS, _VALUES)
    if heads_first:
        blocks = blocks.transpose(1, 2)
    return blocks.contiguous().view(torch.uint8).numpy().tobytes()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

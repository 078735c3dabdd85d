"""From block ids to memory descriptors. Pure: shapes, strides and numbers only.

A descriptor list is an array of shape (n, 3), uint64: address, length in bytes,
device index. The i-th local descriptor is copied to the i-th remote one.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.records import KvRegion, RankMetadata

Descriptors = npt.NDArray[np.uint64]


def block_dimension(shape: Sequence[int], num_blocks: int) -> int:
    """Which dimension of a KV tensor counts blocks. Raises ValueError if none does."""
    for dim in range(min(2, len(shape))):
        if shape[dim] == num_blocks:
            return dim
    raise ValueError(
        f"KV tensor of shape {tuple(shape)}: neither of its first two dimensions is"
        f" {num_blocks} blocks"
    )


def block_order(shape: Sequence[int], strides: Sequence[int], num_blocks: int) -> str:
    """The order of elements inside a block, as text that equal layouts share."""
    behind = block_dimension(shape, num_blocks) + 1
    return f"{list(shape[behind:])}/{list(strides[behind:])}"


def regions_of_tensor(
    layer: str,
    *,
    address: int,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    item_bytes: int,
    num_blocks: int,
) -> tuple[KvRegion, ...]:
    """The regions of one layer's KV tensor, whatever its backend's layout.

    The block dimension is the first or the second; a dimension before it (K and
    V apart) gives one region per index. What lies behind it must be dense, in
    any order. Raises ValueError, naming the shape, for anything else.
    """
    what = f"layer {layer}: KV tensor of shape {tuple(shape)}, strides {tuple(strides_bytes)}"
    dim = block_dimension(shape, num_blocks)
    inner = sorted(zip(strides_bytes[dim + 1 :], shape[dim + 1 :], strict=True))
    block_bytes = item_bytes
    for stride, size in inner:
        if size == 1:
            continue
        if stride != block_bytes:
            raise ValueError(f"{what}: a block is not dense")
        block_bytes *= size
    if strides_bytes[dim] < block_bytes:
        raise ValueError(f"{what}: blocks overlap")
    planes = range(shape[0]) if dim == 1 else range(1)
    return tuple(
        KvRegion(
            layer=layer,
            plane=plane,
            base=address + (plane * strides_bytes[0] if dim == 1 else 0),
            stride_bytes=strides_bytes[dim],
            block_bytes=block_bytes,
        )
        for plane in planes
    )


def contiguous_runs(
    local_ids: Sequence[int], remote_ids: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Longest runs that are consecutive on both sides: (local start, remote start, count)."""
    if len(local_ids) != len(remote_ids):
        raise ValueError(f"{len(local_ids)} local blocks for {len(remote_ids)} remote ones")
    runs: list[tuple[int, int, int]] = []
    for here, there in zip(local_ids, remote_ids, strict=True):
        if runs:
            start, remote_start, count = runs[-1]
            if here == start + count and there == remote_start + count:
                runs[-1] = (start, remote_start, count + 1)
                continue
        runs.append((here, there, 1))
    return runs


def check_compatible(peer: str, local: RankMetadata, remote: RankMetadata) -> None:
    """Raises IncompatiblePeer unless blocks map one to one, region by region."""
    ours = {(r.layer, r.plane): r.block_bytes for r in local.regions}
    theirs = {(r.layer, r.plane): r.block_bytes for r in remote.regions}
    if ours != theirs:
        odd = sorted(set(ours.items()) ^ set(theirs.items()))[:4]
        raise IncompatiblePeer(
            peer, f"KV regions differ: {len(ours)} here, {len(theirs)} there; first: {odd}"
        )


def plan_copy(
    local: RankMetadata,
    remote: RankMetadata,
    local_ids: Sequence[int],
    remote_ids: Sequence[int],
) -> tuple[Descriptors, Descriptors]:
    """Descriptor lists that copy `local_ids` onto `remote_ids` in every region.

    Runs of blocks that lie back to back on both sides become one descriptor.
    The two ranks must have passed `check_compatible`.
    """
    runs = contiguous_runs(local_ids, remote_ids)
    theirs = {(r.layer, r.plane): r for r in remote.regions}
    here: list[tuple[int, int, int]] = []
    there: list[tuple[int, int, int]] = []
    for region in local.regions:
        target = theirs[region.layer, region.plane]
        size = region.block_bytes
        dense = region.stride_bytes == size == target.stride_bytes
        for start, remote_start, count in runs:
            step = count if dense else 1
            for offset in range(0, count, step):
                length = size * step
                at = region.base + (start + offset) * region.stride_bytes
                to = target.base + (remote_start + offset) * target.stride_bytes
                here.append((at, length, local.device))
                there.append((to, length, remote.device))
    return _descriptors(here), _descriptors(there)


def _descriptors(rows: list[tuple[int, int, int]]) -> Descriptors:
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)

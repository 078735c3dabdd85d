"""Maps blocks of one rank to the memory of a peer's blocks. Pure.

A map is made once per peer, so that a job takes a few array operations and no loop over
layers and blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamo_lite.protocol.records import KvRegion

#: Shape (n, 3): address, length in bytes, device index. The i-th local descriptor is
#: copied to the i-th remote one.
Descriptors = npt.NDArray[np.uint64]

#: Unsigned: some GPU addresses have the highest bit set.
_Numbers = npt.NDArray[np.uint64]

_ONE = np.ones(1, dtype=np.uint64)

#: One side of a pair: base address, stride in bytes.
_Side = tuple[int, int]


@dataclass(frozen=True)
class ShardMapping:
    """A lane: blocks of `local` are written to blocks of `remote`, of the same size."""

    #: If `staged`, the prefill rank's whole region.
    local: KvRegion
    remote: KvRegion
    #: Index of the decode rank's region that `remote` is cut from.
    index: int
    #: First byte of `remote` in a block of that region.
    offset: int
    #: The model's KV heads that the lane carries.
    heads: range
    #: Whether blocks differ: the bytes of `remote` are assembled in staging memory before they
    #: are written (see `transpose.py`).
    staged: bool = False


#: (prefill rank, decode rank) -> their lanes, in the order of the decode rank's regions.
#: Pairs without lanes are absent.
Lanes = dict[tuple[int, int], list[ShardMapping]]


class BlockMap:
    """pairs: local region and the remote one that it is copied to; blocks of equal size.

    devices: index of the local and of the remote one.
    """

    def __init__(self, pairs: Sequence[tuple[KvRegion, KvRegion]], devices: tuple[int, int]):
        self._devices = devices
        joined = _joined(pairs)
        dense = [row for row in joined if row[0][1] == row[1][1] == row[2]]
        sparse = [row for row in joined if row not in dense]
        self._dense, self._sparse = _columns(dense), _columns(sparse)

    def descriptors(
        self, local_ids: Sequence[int], remote_ids: Sequence[int]
    ) -> tuple[Descriptors, Descriptors]:
        """Returns descriptors that copy the i-th local block to the i-th remote one.

        Blocks that are contiguous on both sides become one descriptor, in any order of the
        arguments. The descriptors are sorted by region, then by local id. Raises ValueError if
        the numbers of local and remote blocks differ.
        """
        if len(local_ids) != len(remote_ids):
            raise ValueError(f"{len(local_ids)} local blocks for {len(remote_ids)} remote ones")
        here = np.array(local_ids, dtype=np.uint64)
        order = np.argsort(here)
        here, there = here[order], np.array(remote_ids, dtype=np.uint64)[order]
        parts: list[tuple[Descriptors, Descriptors]] = []
        if len(self._dense[0]):
            parts.append(self._rows(self._dense, *_runs(here, there)))
        if len(self._sparse[0]):
            parts.append(self._rows(self._sparse, here, there, _ONE))
        if len(parts) == 1:
            return parts[0]
        local, remote = zip(*parts, strict=True)
        return np.concatenate(local), np.concatenate(remote)

    def _rows(
        self, columns: tuple[_Numbers, ...], here: _Numbers, there: _Numbers, counts: _Numbers
    ) -> tuple[Descriptors, Descriptors]:
        """One row per region and run. here, there: first blocks; counts: blocks."""
        base, stride, remote_base, remote_stride, size = columns
        shape = (len(base), len(here), 3)
        local, remote = np.empty(shape, dtype=np.uint64), np.empty(shape, dtype=np.uint64)
        local[..., 0] = base + stride * here
        remote[..., 0] = remote_base + remote_stride * there
        local[..., 1] = remote[..., 1] = size * counts
        local[..., 2], remote[..., 2] = self._devices
        return local.reshape(-1, 3), remote.reshape(-1, 3)


def maps_of(lanes: Sequence[ShardMapping], devices: tuple[int, int]) -> dict[int, BlockMap]:
    """A map for each KV group. Layers of different groups share memory: a block belongs to one
    group at a time. devices: see `BlockMap`."""
    pairs: dict[int, list[tuple[KvRegion, KvRegion]]] = {}
    for lane in lanes:
        pairs.setdefault(lane.remote.group, []).append((lane.local, lane.remote))
    return {group: BlockMap(pairs[group], devices) for group in sorted(pairs)}


def descriptors(
    maps: Mapping[int, BlockMap], groups: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[Descriptors, Descriptors]:
    """Returns the descriptors of several groups' blocks. groups: local and remote ids by group.

    Raises ValueError, see `BlockMap.descriptors`.
    """
    parts = [blocks.descriptors(*groups[group]) for group, blocks in maps.items()]
    if len(parts) == 1:
        return parts[0]
    local, remote = zip(*parts, strict=True)
    return np.concatenate(local), np.concatenate(remote)


def _joined(
    pairs: Sequence[tuple[KvRegion, KvRegion]],
) -> list[tuple[_Side, _Side, int]]:
    """Joins regions whose blocks are contiguous on both sides into one with larger blocks.

    This is the case for all layers if a block's bytes of all layers lie together.
    """
    rows: list[tuple[_Side, _Side, int]] = []
    for local, remote in sorted(pairs, key=lambda pair: pair[0].base):
        here, there = (local.base, local.stride_bytes), (remote.base, remote.stride_bytes)
        if rows:
            (base, stride), (remote_base, remote_stride), size = rows[-1]
            if here == (base + size, stride) and there == (remote_base + size, remote_stride):
                if size + local.block_bytes <= min(stride, remote_stride):
                    rows[-1] = (*rows[-1][:2], size + local.block_bytes)
                    continue
        rows.append((here, there, local.block_bytes))
    return rows


def _columns(rows: list[tuple[_Side, _Side, int]]) -> tuple[_Numbers, ...]:
    """Base, stride, remote base, remote stride and block size, each of shape (regions, 1)."""
    flat = [[*here, *there, size] for here, there, size in rows]
    table = np.array(flat, dtype=np.uint64).reshape(-1, 5)
    return tuple(table[:, i : i + 1] for i in range(5))


def _runs(here: _Numbers, there: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
    """The longest runs that are consecutive on both sides: first blocks and lengths."""
    if len(here) < 2:
        return here, there, _ONE
    # Unsigned: a negative step wraps around, so it is not 1 either.
    breaks = np.flatnonzero((here[1:] - here[:-1] != 1) | (there[1:] - there[:-1] != 1))
    if not len(breaks):
        return here[:1], there[:1], np.array([len(here)], dtype=np.uint64)
    starts = np.concatenate(([0], breaks + 1))
    counts = np.diff(starts, append=len(here)).astype(np.uint64)
    return here[starts], there[starts], counts

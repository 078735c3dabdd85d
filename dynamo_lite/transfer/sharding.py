"""Who writes what, where two engines spread heads and layers over different ranks. Pure.

A *lane* joins one region of a prefill rank to one region of a decode rank; both
are cut to the heads that this prefill rank brings. Every head of every layer of a
decode rank comes from exactly one prefill rank; where several hold the same head
(more ranks than KV heads), decode ranks take turns among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.records import KvRegion, RankMetadata


@dataclass(frozen=True)
class Lane:
    """Block i of `local` goes to the block of `remote` that it stands for; same size.

    index: which of the decode rank's regions `remote` is cut from; offset: its
    first byte in a block of that.
    """

    local: KvRegion
    remote: KvRegion
    index: int
    offset: int


#: (prefill rank, decode rank) -> its lanes in the order of the decode rank's regions;
#: pairs that have none are absent.
Lanes = dict[tuple[int, int], list[Lane]]


def join(peer: str, own: Sequence[RankMetadata], remote: Sequence[RankMetadata]) -> Lanes:
    """All lanes from a prefill engine's ranks to those of the decode engine `peer`.

    Raises IncompatiblePeer when some part of the peer's blocks cannot be had here,
    or when this engine has layers that the peer has not.
    """
    holders: dict[tuple[str, int], list[tuple[int, KvRegion]]] = {}
    for rank, metadata in enumerate(own):
        for region in metadata.regions:
            holders.setdefault((region.layer, region.plane), []).append((rank, region))
    wanted = {(region.layer, region.plane) for rank in remote for region in rank.regions}
    odd = sorted(wanted ^ holders.keys())
    if odd:
        raise IncompatiblePeer(
            peer,
            f"KV regions differ: {len(holders)} here, {len(wanted)} there; first: {odd[:4]}",
        )
    lanes: Lanes = {}
    for rank, metadata in enumerate(remote):
        for index, region in enumerate(metadata.regions):
            found = holders[region.layer, region.plane]
            for holder, local, heads in _sources(peer, region, rank, found):
                lane = _lane(local, region, index, heads)
                lanes.setdefault((holder, rank), []).append(lane)
    return lanes


def writers(lanes: Lanes, remote_rank: int) -> int:
    """How many ranks write into the decode rank."""
    return sum(remote == remote_rank for _, remote in lanes)


def heads_of(region: KvRegion) -> range:
    """The KV heads in each block of the region; one, of its own kind, if it cannot be cut."""
    count = region.block_bytes // region.head_bytes if region.head_bytes else 1
    return range(region.first_head, region.first_head + count)


def cut(region: KvRegion, offset: int, length: int) -> KvRegion:
    """The region with only these bytes of each block."""
    skipped = offset // region.head_bytes if region.head_bytes else 0
    return msgspec.structs.replace(
        region,
        base=region.base + offset,
        block_bytes=length,
        first_head=region.first_head + skipped,
    )


def _lane(local: KvRegion, region: KvRegion, index: int, heads: range) -> Lane:
    """These heads from a prefill rank's region to a decode rank's."""
    if not region.head_bytes:
        return Lane(local, region, index, 0)
    length = len(heads) * region.head_bytes
    offset = (heads.start - region.first_head) * region.head_bytes
    own_offset = (heads.start - local.first_head) * region.head_bytes
    return Lane(cut(local, own_offset, length), cut(region, offset, length), index, offset)


def _sources(
    peer: str, region: KvRegion, rank: int, holders: Sequence[tuple[int, KvRegion]]
) -> list[tuple[int, KvRegion, range]]:
    """The heads of one region of the decode rank `rank`, in runs, and who brings each."""
    whole = [found for found in holders if _same_block(found[1], region)]
    if whole:
        return [(*whole[rank % len(whole)], heads_of(region))]
    runs: list[tuple[int, KvRegion, range]] = []
    for head in heads_of(region):
        having = [
            (holder, local)
            for holder, local in holders
            if local.head_bytes == region.head_bytes != 0 and head in heads_of(local)
        ]
        if not having:
            raise IncompatiblePeer(peer, _odds(region, rank, holders))
        holder, local = having[rank % len(having)]
        if runs and runs[-1][0] == holder:
            runs[-1] = (holder, local, range(runs[-1][2].start, head + 1))
        else:
            runs.append((holder, local, range(head, head + 1)))
    return runs


def _odds(region: KvRegion, rank: int, holders: Sequence[tuple[int, KvRegion]]) -> str:
    here = "; ".join(f"rank {holder}: {_spelled(local)}" for holder, local in holders)
    return (
        f"layer {region.layer}: blocks of its rank {rank} ({_spelled(region)}) cannot be put"
        f" together from blocks here ({here})"
    )


def _spelled(region: KvRegion) -> str:
    if not region.head_bytes:
        return f"{region.block_bytes} bytes that cannot be cut, from head {region.first_head} on"
    heads = heads_of(region)
    return f"heads {heads.start} to {heads.stop - 1} of {region.head_bytes} bytes each"


def _same_block(one: KvRegion, other: KvRegion) -> bool:
    return (one.block_bytes, one.head_bytes, one.first_head) == (
        other.block_bytes,
        other.head_bytes,
        other.first_head,
    )

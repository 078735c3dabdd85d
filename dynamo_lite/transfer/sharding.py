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
    """Block i of `local` goes to the block of `remote` that it stands for; same size."""

    local: KvRegion
    remote: KvRegion


#: (prefill rank, decode rank) -> its lanes; pairs that have none are absent.
Lanes = dict[tuple[int, int], list[Lane]]


def join(peer: str, own: Sequence[RankMetadata], remote: Sequence[RankMetadata]) -> Lanes:
    """All lanes from a prefill engine's ranks to those of the decode engine `peer`.

    Raises IncompatiblePeer when some part of the peer's blocks cannot be had here,
    or when this engine has layers that the peer has not.
    """
    holders: dict[tuple[str, int], list[tuple[int, KvRegion]]] = {}
    for index, rank in enumerate(own):
        for region in rank.regions:
            holders.setdefault((region.layer, region.plane), []).append((index, region))
    wanted = {(region.layer, region.plane) for rank in remote for region in rank.regions}
    odd = sorted(wanted ^ holders.keys())
    if odd:
        raise IncompatiblePeer(
            peer,
            f"KV regions differ: {len(holders)} here, {len(wanted)} there; first: {odd[:4]}",
        )
    lanes: Lanes = {}
    for index, rank in enumerate(remote):
        for region in rank.regions:
            found = holders[region.layer, region.plane]
            for holder, lane in _lanes_to(peer, region, index, found):
                lanes.setdefault((holder, index), []).append(lane)
    return lanes


def writers(lanes: Lanes, remote_rank: int) -> int:
    """How many ranks write into the decode rank."""
    return sum(remote == remote_rank for _, remote in lanes)


def heads_of(region: KvRegion) -> range:
    """The KV heads in each block of the region; one, of its own kind, if it cannot be cut."""
    count = region.block_bytes // region.head_bytes if region.head_bytes else 1
    return range(region.first_head, region.first_head + count)


def _lanes_to(
    peer: str, region: KvRegion, index: int, holders: Sequence[tuple[int, KvRegion]]
) -> list[tuple[int, Lane]]:
    """What the decode rank `index` gets into one of its regions, and from whom."""
    whole = [(i, r) for i, r in holders if _same_block(r, region)]
    if whole:
        holder, local = whole[index % len(whole)]
        return [(holder, Lane(local, region))]
    fitting = [(i, r) for i, r in holders if r.head_bytes == region.head_bytes != 0]
    found: list[tuple[int, Lane]] = []
    runs: list[tuple[int, KvRegion, range]] = []
    for head in heads_of(region):
        having = [(i, r) for i, r in fitting if head in heads_of(r)]
        if not having:
            raise IncompatiblePeer(
                peer,
                f"layer {region.layer}: head {head} of its rank {index} ({region.block_bytes}"
                f" bytes per block, {region.head_bytes} per head) is not to be had here",
            )
        holder, local = having[index % len(having)]
        if runs and runs[-1][0] == holder and runs[-1][2].stop == head:
            runs[-1] = (holder, local, range(runs[-1][2].start, head + 1))
        else:
            runs.append((holder, local, range(head, head + 1)))
    for holder, local, heads in runs:
        found.append((holder, Lane(_cut(local, heads), _cut(region, heads))))
    return found


def _same_block(one: KvRegion, other: KvRegion) -> bool:
    return (one.block_bytes, one.head_bytes, one.first_head) == (
        other.block_bytes,
        other.head_bytes,
        other.first_head,
    )


def _cut(region: KvRegion, heads: range) -> KvRegion:
    """The region with only these heads in each block."""
    return msgspec.structs.replace(
        region,
        base=region.base + (heads.start - region.first_head) * region.head_bytes,
        block_bytes=len(heads) * region.head_bytes,
        first_head=heads.start,
    )

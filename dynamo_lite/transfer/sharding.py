"""Which rank writes which bytes, if two engines split heads and layers differently. Pure.

A *lane* (`ShardMapping`) maps a region of a prefill rank to a region of a decode rank, both
cut to the heads that this prefill rank writes. Every head of every layer of a decode rank
comes from exactly one prefill rank. If several hold the same head (more ranks than KV
heads), they are assigned to the decode ranks in turn. If blocks differ in size or internal
order, all lanes between the two engines are staged.

Writers name their parts of the blocks in their commits; the decode rank checks that together they
cover its blocks.
"""

from collections.abc import Iterable, Sequence

import msgspec

from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.kv_regions import heads_of
from dynamo_lite.protocol.prefill import Part
from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.transfer.block_map import Lanes, ShardMapping
from dynamo_lite.transfer.transpose import all_staged, can_be_staged


def join(peer: str, own: Sequence[RankMetadata], remote: Sequence[RankMetadata]) -> Lanes:
    """Returns all lanes from a prefill engine's ranks to those of the decode engine `peer`.

    Raises IncompatiblePeer if this engine cannot provide some part of the peer's blocks, or
    has layers that the peer does not have.
    """
    holders: dict[str, list[tuple[int, KvRegion]]] = {}
    for rank, metadata in enumerate(own):
        for region in metadata.regions:
            holders.setdefault(region.layer, []).append((rank, region))
    wanted = {region.layer for rank in remote for region in rank.regions}
    odd = sorted(wanted ^ holders.keys())
    if odd:
        raise IncompatiblePeer(
            peer,
            f"KV regions differ: {len(holders)} here, {len(wanted)} there; first: {odd[:4]}",
        )
    lanes: Lanes = {}
    for rank, metadata in enumerate(remote):
        for index, region in enumerate(metadata.regions):
            found = holders[region.layer]
            if other := next((local for _, local in found if local.group != region.group), None):
                raise IncompatiblePeer(
                    peer,
                    f"layer {region.layer} is in KV group {other.group} here, {region.group} there",
                )
            for holder, local, heads in _sources(peer, region, rank, found):
                lane = _lane(local, region, index, heads)
                lanes.setdefault((holder, rank), []).append(lane)
    if any(lane.staged for mine in lanes.values() for lane in mine):
        return all_staged(peer, own, lanes)
    return lanes


def parts_of(lanes: Sequence[ShardMapping]) -> list[Part]:
    """The remote bytes of the lanes; equal parts of neighbouring regions are joined."""
    parts: list[Part] = []
    for lane in lanes:
        offset, length = lane.offset, lane.remote.block_bytes
        if parts:
            last = parts[-1]
            if (last.first + last.count, last.offset, last.length) == (lane.index, offset, length):
                parts[-1] = Part(last.first, last.count + 1, offset, length)
                continue
        parts.append(Part(lane.index, 1, offset, length))
    return parts


def hole(regions: Sequence[KvRegion], parts: Iterable[Part]) -> str | None:
    """Returns what the parts miss of the rank's blocks, name twice or have outside of them; None
    if nothing."""
    spans: list[list[tuple[int, int]]] = [[] for _ in regions]
    for part in parts:
        if part.first + part.count > len(regions):
            return f"{part}: there are only {len(regions)} regions"
        for index in range(part.first, part.first + part.count):
            spans[index].append((part.offset, part.offset + part.length))
    for region, brought in zip(regions, spans, strict=True):
        at = 0
        for start, end in sorted(brought):
            if start != at:
                break
            at = end
        else:
            if at == region.block_bytes:
                continue
        return f"layer {region.layer}: bytes {sorted(brought)} of {region.block_bytes}"
    return None


def cut(region: KvRegion, offset: int, length: int) -> KvRegion:
    """Returns the region with only these bytes of each block."""
    skipped = offset // region.head_bytes if region.head_bytes else 0
    return msgspec.structs.replace(
        region,
        base=region.base + offset,
        block_bytes=length,
        first_head=region.first_head + skipped,
    )


def _lane(local: KvRegion, region: KvRegion, index: int, heads: range) -> ShardMapping:
    """The lane for these heads, from a prefill rank's region to a decode rank's."""
    remote, offset = region, 0
    if region.head_bytes:
        length = len(heads) * region.head_bytes
        offset = (heads.start - region.first_head) * region.head_bytes
        remote = cut(region, offset, length)
    if not _same_order(local, region):
        return ShardMapping(local, remote, index, offset, heads, staged=True)
    if region.head_bytes:
        own_offset = (heads.start - local.first_head) * region.head_bytes
        local = cut(local, own_offset, remote.block_bytes)
    return ShardMapping(local, remote, index, offset, heads)


def _sources(
    peer: str, region: KvRegion, rank: int, holders: Sequence[tuple[int, KvRegion]]
) -> list[tuple[int, KvRegion, range]]:
    """The heads of one region of the decode rank `rank` in runs, with the source of each."""
    whole = [found for found in holders if _same_block(found[1], region)]
    if whole:
        return [(*whole[rank % len(whole)], heads_of(region))]
    if region.head_bytes:
        heads = heads_of(region)
        wanted = [range(head, head + 1) for head in heads]
    else:
        wanted = [heads_of(region)]
    runs: list[tuple[int, KvRegion, range]] = []
    for heads in wanted:
        having = [
            (holder, local)
            for holder, local in holders
            if heads.start in heads_of(local)
            and heads[-1] in heads_of(local)
            and (_can_be_cut(local, region) or can_be_staged(local, region))
        ]
        if not having:
            raise IncompatiblePeer(peer, _difference(region, rank, holders))
        holder, local = having[rank % len(having)]
        if runs and runs[-1][0] == holder:
            runs[-1] = (holder, local, range(runs[-1][2].start, heads.stop))
        else:
            runs.append((holder, local, heads))
    return runs


def _difference(region: KvRegion, rank: int, holders: Sequence[tuple[int, KvRegion]]) -> str:
    here = "; ".join(f"rank {holder}: {_described(local)}" for holder, local in holders)
    return (
        f"layer {region.layer}: blocks of its rank {rank} ({_described(region)}) cannot be put"
        f" together from blocks here ({here})"
    )


def _can_be_cut(local: KvRegion, region: KvRegion) -> bool:
    return local.head_bytes == region.head_bytes != 0 and _same_order(local, region)


def _same_order(local: KvRegion, region: KvRegion) -> bool:
    """Whether bytes have the same order in a head or a block. Unknown orders are compared in
    the engines' fingerprints."""
    return (local.tokens, local.arrays) == (region.tokens, region.arrays)


def _described(region: KvRegion) -> str:
    text = f"{region.block_bytes} bytes that cannot be cut, from head {region.first_head} on"
    if region.head_bytes:
        heads = heads_of(region)
        text = f"heads {heads.start} to {heads.stop - 1} of {region.head_bytes} bytes each"
    order = f"{region.tokens} tokens" if region.arrays else "in an order that is not known"
    return f"{text}, {order}"


def _same_block(one: KvRegion, other: KvRegion) -> bool:
    return (one.block_bytes, one.head_bytes, one.first_head) == (
        other.block_bytes,
        other.head_bytes,
        other.first_head,
    ) and _same_order(one, other)

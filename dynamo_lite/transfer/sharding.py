"""Which rank writes which bytes, if two engines split heads and layers differently. Pure.

A *lane* (`ShardMapping`) maps a region of a prefill rank to a region of a decode rank, both
cut to the heads that this prefill rank writes. Every head of every layer of a decode rank
comes from exactly one prefill rank. If several hold the same head (more ranks than KV
heads), they are assigned to the decode ranks in turn. If blocks differ in size or internal
order, all lanes between the two engines are staged.

Writers name their parts of the blocks in their commits; the decode rank checks that together they
cover its blocks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.kv_regions import heads_of
from dynamo_lite.protocol.prefill import Part
from dynamo_lite.protocol.records import KvRegion, RankMetadata


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
        return _all_staged(peer, own, lanes)
    return lanes


def writers(lanes: Lanes, remote_rank: int) -> int:
    """Returns the number of ranks that write to the decode rank."""
    return sum(remote == remote_rank for _, remote in lanes)


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


def _all_staged(peer: str, own: Sequence[RankMetadata], lanes: Lanes) -> Lanes:
    """Stages all lanes: one write cannot mix blocks of different sizes on a side."""
    if any(lane.remote.group for mine in lanes.values() for lane in mine):
        raise IncompatiblePeer(
            peer,
            "blocks of a model with several KV groups must be equal on both sides, unless"
            " disable-hybrid-kv-cache-manager: true puts all layers into one group",
        )
    tokens = {(lane.local.tokens, lane.remote.tokens) for mine in lanes.values() for lane in mine}
    if len(tokens) > 1:
        raise IncompatiblePeer(
            peer,
            f"layers differ in their tokens per block, here and there: {sorted(tokens)}",
        )
    unknown = next((m for mine in lanes.values() for m in mine if not m.local.arrays), None)
    if unknown is not None:
        raise IncompatiblePeer(
            peer,
            f"other blocks differ, and those of layer {unknown.local.layer} have an order that"
            " is not known, here and there",
        )
    staged: Lanes = {}
    for (holder, rank), mine in lanes.items():
        whole = {region.layer: region for region in own[holder].regions}
        staged[holder, rank] = [
            replace(lane, local=whole[lane.local.layer], staged=True) for lane in mine
        ]
    return staged


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


def can_be_staged(local: KvRegion, remote: KvRegion) -> bool:
    """Whether blocks of `remote` can be assembled from the items of `local`'s blocks."""
    if not local.arrays or len(local.arrays) != len(remote.arrays):
        return False
    unit = math.gcd(local.tokens, remote.tokens)
    return all(
        (here.group_tokens, here.items, here.item_bytes)
        == (there.group_tokens, there.items, there.item_bytes)
        and unit % here.group_tokens == 0
        for here, there in zip(local.arrays, remote.arrays, strict=True)
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

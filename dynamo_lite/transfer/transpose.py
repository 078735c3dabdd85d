"""The layout of staged KV, for blocks of another size or order. Pure.

A prefill rank assembles the bytes of a decode rank's blocks in a *slot* of its staging
memory, lane after lane and block after block in each, and writes from there. All positions
in a slot are computed once per peer. Each write only determines where its tokens are, in
*units*: the largest runs of tokens that no block boundary of either side cuts (the greatest
common divisor of the two block sizes).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.records import KvArray, KvRegion, RankMetadata
from dynamo_lite.transfer.block_map import Lanes, ShardMapping

#: The widest word of a copy.
_WORD_BYTES = 8


@dataclass(frozen=True)
class ArrayPlace:
    """The location of an array, as a start and strides in bytes."""

    #: An address, or a position in a slot.
    start: int
    block: int
    #: From one unit of tokens to the next within a block.
    unit: int
    head: int
    group: int
    item: int


@dataclass(frozen=True)
class ArrayMove:
    """One array of one lane; each unit has heads x groups x items of item_bytes."""

    #: Location in this rank's KV.
    source: ArrayPlace
    #: Location in a slot.
    target: ArrayPlace
    heads: int
    groups: int
    items: int
    item_bytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """How a peer's blocks are assembled in a slot."""

    #: Blocks of the peer per slot.
    capacity: int
    #: Location of these blocks in a slot at address 0, by lane.
    regions: list[KvRegion]
    moves: list[ArrayMove]
    #: Tokens per block of this rank.
    local_tokens: int
    #: Tokens per block of the peer.
    target_tokens: int
    #: Divides every number in the moves.
    word_bytes: int

    @property
    def unit_tokens(self) -> int:
        return math.gcd(self.local_tokens, self.target_tokens)

    @property
    def target_units(self) -> int:
        return self.target_tokens // self.unit_tokens


@dataclass(frozen=True)
class Units:
    """The units of a write, in the order of its tokens."""

    #: This rank's block of each unit.
    blocks: npt.NDArray[np.int64]
    #: Number of each unit within that block.
    units: npt.NDArray[np.int64]
    #: Further units after the end of the prompt; their bytes become zero.
    padding: int


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


def all_staged(peer: str, own: Sequence[RankMetadata], lanes: Lanes) -> Lanes:
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


def slot_layout(lanes: Sequence[ShardMapping], slot_bytes: int) -> Layout:
    """Lays out staged lanes to one or several ranks. Raises ValueError if no block fits."""
    block_bytes = sum(lane.remote.block_bytes for lane in lanes)
    capacity = slot_bytes // block_bytes
    if capacity == 0:
        raise ValueError(f"a block needs {block_bytes} bytes, a slot has only {slot_bytes}")
    here, there = lanes[0].local.tokens, lanes[0].remote.tokens
    unit = math.gcd(here, there)
    at = 0
    regions: list[KvRegion] = []
    moves: list[ArrayMove] = []
    for lane in lanes:
        regions.append(_in_slot(lane.remote, at))
        first = lane.heads.start - lane.local.first_head
        for source, target in zip(lane.local.arrays, lane.remote.arrays, strict=True):
            start = lane.local.base + first * source.head_stride
            moves.append(
                ArrayMove(
                    source=_place(source, start, lane.local.stride_bytes, unit),
                    target=_place(target, at, lane.remote.block_bytes, unit),
                    heads=len(lane.heads),
                    groups=unit // source.group_tokens,
                    items=source.items,
                    item_bytes=source.item_bytes,
                )
            )
        at += capacity * lane.remote.block_bytes
    return Layout(capacity, regions, moves, here, there, _word_bytes(moves))


def units_of(layout: Layout, local_ids: Sequence[int], skip_tokens: int, count: int) -> Units:
    """Returns where the tokens of `count` blocks of the peer lie in this rank's blocks.

    skip_tokens: number of tokens of local_ids[0] before them. Raises ValueError if they do not
    begin at a unit, or if their last block has no token in `local_ids`.
    """
    unit = layout.unit_tokens
    per_block = layout.local_tokens // unit
    skipped, rest = divmod(skip_tokens, unit)
    wanted = count * layout.target_units
    numbers = np.arange(skipped, min(skipped + wanted, len(local_ids) * per_block))
    if rest or len(numbers) <= max(wanted - layout.target_units, 0):
        raise ValueError(
            f"{count} blocks of {layout.target_tokens} tokens from {len(local_ids)} of"
            f" {layout.local_tokens}, {skip_tokens} tokens into the first one"
        )
    blocks = np.asarray(local_ids, dtype=np.int64)[numbers // per_block]
    return Units(blocks, numbers % per_block, wanted - len(numbers))


def _in_slot(remote: KvRegion, at: int) -> KvRegion:
    return KvRegion(
        layer=remote.layer,
        base=at,
        stride_bytes=remote.block_bytes,
        block_bytes=remote.block_bytes,
    )


def _place(array: KvArray, start: int, block_stride: int, unit: int) -> ArrayPlace:
    return ArrayPlace(
        start=start + array.offset,
        block=block_stride,
        unit=unit // array.group_tokens * array.group_stride,
        head=array.head_stride,
        group=array.group_stride,
        item=array.item_stride,
    )


def _word_bytes(moves: Sequence[ArrayMove]) -> int:
    numbers = [_WORD_BYTES]
    for move in moves:
        numbers.append(move.item_bytes)
        for place in (move.source, move.target):
            numbers += [place.start, place.block, place.unit, place.head, place.group, place.item]
    return math.gcd(*numbers)

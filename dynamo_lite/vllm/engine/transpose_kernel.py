"""The copy into staging memory as one Triton kernel: a program per move and unit of tokens."""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl

from dynamo_lite.transfer.transpose import ArrayMove, Layout, Units

#: Words that a program copies per iteration.
_BATCH = 1024
#: Numbers of a move in the table: two places and the sizes of a unit.
_COLUMNS = 16
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _copy_units(
    moves,
    blocks,
    units,
    slot,
    have,
    target_units,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    BATCH: tl.constexpr,
):
    """moves: int64 [moves, COLUMNS], see `_row`. blocks, units: int64 [have], the place of each
    unit. slot: the slot's address. Units from `have` on become zero."""
    move = moves + tl.program_id(0) * COLUMNS
    unit = tl.program_id(1).to(tl.int64)
    groups, items, words = tl.load(move + 13), tl.load(move + 14), tl.load(move + 15)
    total = tl.load(move + 12) * groups * items * words
    known = unit < have
    filled = tl.where(known, total, 0)
    source = tl.load(move)
    source += tl.load(blocks + unit, mask=known, other=0) * tl.load(move + 1)
    source += tl.load(units + unit, mask=known, other=0) * tl.load(move + 2)
    target = slot + tl.load(move + 6)
    target += unit // target_units * tl.load(move + 7)
    target += unit % target_units * tl.load(move + 8)
    for first in range(0, total, BATCH):
        at = first + tl.arange(0, BATCH).to(tl.int64)
        word = at % words
        item = at // words % items
        group = at // (words * items) % groups
        head = at // (words * items * groups)
        here = source + head * tl.load(move + 3) + group * tl.load(move + 4)
        here += item * tl.load(move + 5) + word * WORD_BYTES
        there = target + head * tl.load(move + 9) + group * tl.load(move + 10)
        there += item * tl.load(move + 11) + word * WORD_BYTES
        here = here.to(tl.pointer_type(WORD))  # type: ignore[arg-type]
        there = there.to(tl.pointer_type(WORD))  # type: ignore[arg-type]
        tl.store(there, tl.load(here, mask=at < filled, other=0), mask=at < total)


class KernelCopy:
    """staging: the staging memory. Launches on the current stream."""

    def __init__(self, staging: torch.Tensor):
        self._staging = staging
        self._tables: WeakKeyDictionary[Layout, torch.Tensor] = WeakKeyDictionary()

    def __call__(self, layout: Layout, units: Units, offset: int) -> None:
        device, have = self._staging.device, len(units.blocks)
        places = torch.from_numpy(np.stack([units.blocks, units.units])).to(device)
        kernel: Any = _copy_units
        kernel[(len(layout.moves), have + units.padding)](
            self._table(layout),
            places[0],
            places[1],
            self._staging.data_ptr() + offset,
            have,
            layout.target_units,
            COLUMNS=_COLUMNS,
            WORD=_WORDS[layout.word_bytes],
            WORD_BYTES=layout.word_bytes,
            BATCH=_BATCH,
        )

    def _table(self, layout: Layout) -> torch.Tensor:
        """The layout's moves on the device, cached for each layout."""
        table = self._tables.get(layout)
        if table is None:
            rows = [_row(move, layout.word_bytes) for move in layout.moves]
            table = torch.tensor(rows, dtype=torch.int64).to(self._staging.device)
            self._tables[layout] = table
        return table


def _row(move: ArrayMove, word_bytes: int) -> list[int]:
    places = [
        number
        for place in (move.source, move.target)
        for number in (
            place.start,
            place.block,
            place.unit,
            place.head,
            place.group,
            place.item,
        )
    ]
    return [*places, move.heads, move.groups, move.items, move.item_bytes // word_bytes]

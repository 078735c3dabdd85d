"""The KV pool's bytes, at addresses of a made-up address space."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynamo_lite.protocol.records import KvRegion
from tests.simulation.engine.model import PLANES, Words, kv_words

_WORD_BYTES = 8


class SimKvMemory:
    """PLANES words per token: layer "0" in one plane, layer "1" with K and V apart.

    base: address of the first byte. dense: whether each plane's blocks lie back
    to back, or the planes of a block do.
    """

    def __init__(self, num_blocks: int, block_size: int, base: int, *, dense: bool):
        self.num_blocks, self.block_size, self.base, self._dense = (
            num_blocks,
            block_size,
            base,
            dense,
        )
        shape = (PLANES, num_blocks, block_size) if dense else (num_blocks, PLANES, block_size)
        self._words: Words = np.zeros(shape, np.uint64)
        #: (PLANES, blocks, tokens), whatever the layout.
        self._by_plane = self._words if dense else self._words.transpose(1, 0, 2)
        self.raw: npt.NDArray[np.uint8] = self._words.reshape(-1).view(np.uint8)

    def covers(self, address: int, length: int) -> bool:
        start = address - self.base
        return start >= 0 and start + length <= self.raw.size

    def bytes_at(self, address: int, length: int) -> npt.NDArray[np.uint8]:
        return self.raw[address - self.base :][:length]

    @property
    def block_bytes(self) -> int:
        """Of one block in one plane."""
        return self.block_size * _WORD_BYTES

    def regions(self) -> tuple[KvRegion, ...]:
        size = self.block_bytes
        step = self.num_blocks * size if self._dense else size
        stride = size if self._dense else PLANES * size
        return tuple(
            KvRegion(
                layer=str(min(index, 1)),
                plane=max(index - 1, 0),
                base=self.base + index * step,
                stride_bytes=stride,
                block_bytes=size,
            )
            for index in range(PLANES)
        )

    def block_at(self, offset: int) -> int:
        """Which block the byte `offset` belongs to."""
        block = offset // self.block_bytes
        return block % self.num_blocks if self._dense else block // PLANES

    def fill(self, block_ids: Sequence[int], start: int, states: Sequence[int]) -> None:
        """Writes the KV of the positions from `start` on of a sequence in these blocks."""
        words = kv_words(states)
        at, end, size = start, start + len(states), self.block_size
        while at < end:
            upto = min(end, (at // size + 1) * size)
            block, first = block_ids[at // size], at % size
            self._by_plane[:, block, first : first + upto - at] = words[
                :, at - start : upto - start
            ]
            at = upto

    def ends_with(self, block: int, state: int) -> bool:
        """Whether the block's last token has this state."""
        return bool((self._by_plane[:, block, -1] == kv_words([state])[:, 0]).all())

    def read(self, block_ids: Sequence[int], count: int) -> Words:
        """The KV of a sequence's first `count` positions: shape (PLANES, count)."""
        used = block_ids[: -(-count // self.block_size)]
        return self._by_plane[:, used].reshape(PLANES, -1)[:, :count]

"""Which workers hold which KV blocks, and how much of a prompt each one has.

A dictionary from a block's chain hash (`kv_chain.py`) to a bit set of workers. There is no tree: a
hash stands for its whole prefix, and a worker that holds a block holds all blocks before it, since
engines evict the end of a prompt first. So the longest prefixes are found by bisection, with a few
look-ups for a prompt of any length; each is a miss of the processor's cache.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice

from dynamo_lite.routing.kv_chain import ChainHash

#: One in this many blocks is evicted at a time when there are too many.
_EVICTED_PART = 256
#: One match in this many makes its blocks the youngest: popular ones are matched often.
_SAMPLE = 16
#: Most bit sets whose workers are remembered.
_MAX_NAMED = 4096


class KvIndex:
    """Workers are known by any integer. All events may be repeated.

    block_size: for its users, in tokens or bytes. max_blocks: most different blocks. Beyond it
    those are evicted that were stored or matched longest ago, whichever workers hold them.
    evicted: how many were.
    """

    def __init__(self, block_size: int, max_blocks: int):
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        self.block_size = block_size
        self.evicted = 0
        self._max_blocks = max_blocks
        #: Hash to the workers that hold it. A worker is its bit. There is no index from a worker to
        #: its hashes: all are scanned when it leaves, which is rare, and takes some tens of
        #: milliseconds with a million hashes.
        self._held: dict[ChainHash, int] = {}
        self._bits: dict[int, int] = {}
        self._slots: list[int | None] = []
        #: The workers of bit sets that were matched; loads have few different ones.
        self._named: dict[int, tuple[int, ...]] = {}
        #: Of each worker, what it was promised for and has not stored since.
        self._promised: dict[int, set[ChainHash]] = {}
        self._matches = 0

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._held)

    def __repr__(self) -> str:
        return f"<KvIndex blocks={len(self)} workers={len(self._bits)}>"

    def held(self, worker: int) -> Set[ChainHash]:
        """The blocks of one worker; scans all blocks."""
        bit = self._bits.get(worker, 0)
        return {key for key, workers in self._held.items() if workers & bit}

    def match(self, hashes: Sequence[ChainHash]) -> dict[int, int]:
        """How many of the first blocks each worker holds, without a gap. Workers with none are left
        out.

        hashes: of a prompt's blocks, from the first on.
        """
        counts: dict[int, int] = {}
        for count, bits in self._find(hashes):
            counts.update(dict.fromkeys(self._named.get(bits) or self._name(bits), count))
        return counts

    def _name(self, bits: int) -> tuple[int, ...]:
        if len(self._named) >= _MAX_NAMED:
            self._named.clear()
        names = self._named[bits] = tuple(self._workers(bits))
        return names

    def _workers(self, bits: int) -> Iterator[int]:
        while bits:
            lowest = bits & -bits
            # A worker that has left has no name.
            if (worker := self._slots[lowest.bit_length() - 1]) is not None:
                yield worker
            bits ^= lowest

    def _find(self, hashes: Sequence[ChainHash]) -> list[tuple[int, int]]:
        """How many of the first blocks, and the bit set of the workers that hold exactly these;
        the longest first."""
        found: list[tuple[int, int]] = []
        if not hashes:
            return found
        get, end = self._held.get, len(hashes)
        # Workers whose last block is not found yet. All of them hold the first one.
        left = get(hashes[0], 0)
        while left:
            last, workers = 0, left
            if end == len(hashes) and (there := get(hashes[-1], 0) & left):
                last, workers = end - 1, there
            while end - last > 1:
                middle = (last + end) // 2
                if there := get(hashes[middle], 0) & left:
                    last, workers = middle, there
                else:
                    end = middle
            found.append((last + 1, workers))
            left, end = left & ~workers, last
        if found:
            self._matches += 1
            if self._matches % _SAMPLE == 0 and 2 * len(self) > self._max_blocks:
                self._keep(hashes[: found[0][0]])
        return found

    def stored(self, worker: int, hashes: Sequence[ChainHash]) -> None:
        """The worker holds these blocks, and those before them."""
        bit, held = self._bits.get(worker) or self._join(worker), self._held
        if held.keys().isdisjoint(hashes):
            held.update(dict.fromkeys(hashes, bit))
        else:
            for key in hashes:
                held[key] = held.get(key, 0) | bit
        if promised := self._promised.get(worker):
            promised.difference_update(hashes)
        if len(self) > self._max_blocks:
            self._evict()

    def promised(self, worker: int, hashes: Sequence[ChainHash]) -> None:
        """The worker, which holds none of these blocks, is about to compute them."""
        self.stored(worker, hashes)
        self._promised.setdefault(worker, set()).update(hashes)

    def settled(self, worker: int, hashes: Sequence[ChainHash], *, computed: bool) -> None:
        """The worker has computed blocks that it was promised for, or never will. Those that it has
        stored itself stay."""
        promised = self._promised.get(worker, set[ChainHash]())
        left = promised.intersection(hashes)
        promised -= left
        if not computed:
            self.removed(worker, left)

    def removed(self, worker: int, hashes: Iterable[ChainHash]) -> None:
        """The worker no longer holds these blocks."""
        bit, held = self._bits.get(worker, 0), self._held
        for key in hashes:
            others = held.get(key, 0)
            if others & bit:
                if others == bit:
                    del held[key]
                else:
                    held[key] = others ^ bit

    def leave(self, worker: int) -> None:
        """All blocks of the worker are gone; it is forgotten until it stores one."""
        if worker not in self._bits:
            return
        self._promised.pop(worker, None)
        self.removed(worker, self.held(worker))
        self._slots[self._bits.pop(worker).bit_length() - 1] = None
        self._named.clear()

    def _join(self, worker: int) -> int:
        if None in self._slots:
            slot = self._slots.index(None)
            self._slots[slot] = worker
        else:
            slot = len(self._slots)
            self._slots.append(worker)
        self._named.clear()
        bit = self._bits[worker] = 1 << slot
        return bit

    def _keep(self, hashes: Iterable[ChainHash]) -> None:
        """Blocks that are in use become the youngest."""
        held = self._held
        for key in hashes:
            if workers := held.pop(key, 0):
                held[key] = workers

    def _evict(self) -> None:
        """A dictionary keeps its order, so the oldest come first."""
        excess = len(self) - self._max_blocks + self._max_blocks // _EVICTED_PART
        for key in list(islice(self._held, excess)):
            del self._held[key]
        self.evicted += excess

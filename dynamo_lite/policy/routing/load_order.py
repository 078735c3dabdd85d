"""Workers in the order of their load, so that the least loaded one is found without looking at all.

Two sorted lists: workers with room in their KV cache, and those without. Finding a place takes
O(log n) comparisons. The list then shifts its pointers, which takes microseconds for thousands.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Set

#: What workers are ordered by; smaller is better. Two workers never have the same one.
Rank = tuple[int, int, int]


class LoadOrder:
    """Workers are known by any integer."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Rank, int]] = {}
        self._roomy: list[tuple[Rank, int]] = []
        self._full: list[tuple[Rank, int]] = []
        self._is_full: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, worker: int) -> bool:
        return worker in self._entries

    def replace(self, workers: Iterable[tuple[int, Rank, bool]]) -> None:
        """These are the workers: each one's name, rank, and whether its KV cache is full."""
        self._entries, self._roomy, self._full, self._is_full = {}, [], [], set()
        for worker, rank, full in workers:
            entry = self._entries[worker] = rank, worker
            (self._full if full else self._roomy).append(entry)
            if full:
                self._is_full.add(worker)
        self._roomy.sort()
        self._full.sort()

    def move(self, worker: int, rank: Rank, full: bool) -> None:
        """The worker, which is known, has another rank, or room for the first or last time."""
        old = self._entries[worker]
        was_full = worker in self._is_full
        if old[0] == rank and was_full == full:
            return
        entries = self._full if was_full else self._roomy
        del entries[bisect_left(entries, old)]
        entry = self._entries[worker] = rank, worker
        insort(self._full if full else self._roomy, entry)
        (self._is_full.add if full else self._is_full.discard)(worker)

    def full(self, worker: int) -> bool:
        return worker in self._is_full

    def count(self, without: Set[int]) -> int:
        """How many workers there are besides these."""
        return len(self._entries) - sum(worker in self._entries for worker in without)

    def any_roomy(self, without: Set[int]) -> bool:
        """Whether there is a worker with room besides these."""
        return any(worker not in without for _, worker in self._roomy)

    def first(
        self, *, full: bool, without: Set[int], among: Collection[int] | None = None
    ) -> int | None:
        """The first of the workers with room, or of the full ones.

        among: only these. A few are looked up one by one; many are met soon on the way through
        the order.
        """
        entries = self._full if full else self._roomy
        if among is None:
            return next((worker for _, worker in entries if worker not in without), None)
        if len(among) ** 2 <= 4 * len(entries):
            known = (
                self._entries[worker]
                for worker in among
                if worker in self._entries
                and worker not in without
                and (worker in self._is_full) == full
            )
            return min(known, default=(None, None))[1]
        return next((w for _, w in entries if w in among and w not in without), None)

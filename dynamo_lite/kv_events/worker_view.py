"""A router's view of one worker, built from its notices and snapshots."""

from collections.abc import Sequence

from dynamo_lite.policy.routing.kv_index import KvIndex
from dynamo_lite.protocol.kv import KvChange, KvNotice, KvRemoved, KvSnapshot, KvStored, Load

#: How many notices are kept while a snapshot is fetched.
_MAX_ASIDE = 10_000


class WorkerView:
    """Bookkeeping only: no I/O."""

    def __init__(self, lease_id: int, model: str):
        self.lease_id, self.model = lease_id, model
        #: Number of the last notice that is in the index. None while a snapshot is needed.
        self.number: int | None = None
        #: The last reported load, and when it was received by the caller's clock.
        self.load: Load | None = None
        self.heard_at = 0.0
        #: Tokens per block.
        self.block_size = 0
        #: The index with its blocks; None before the first snapshot.
        self.index: KvIndex | None = None
        #: Notices that wait for a snapshot.
        self._aside: list[KvNotice] = []

    def __repr__(self) -> str:
        return f"<WorkerView {self.lease_id:x} number={self.number} aside={len(self._aside)}>"

    def invalidate(self) -> None:
        """Notices may be missing: keeps the index as it is until a snapshot comes."""
        self.number = None
        self._aside.clear()

    def receive(self, notice: KvNotice) -> str:
        """Returns what was done with it: "applied", "late" (dropped), or kept until a snapshot
        comes: "gap" when it is the first notice after a gap, else "aside"."""
        if self.number is None:
            self._put_aside(notice)
            return "aside"
        if notice.number <= self.number:
            return "late"
        if notice.number > self.number + 1:
            self.invalidate()
            self._put_aside(notice)
            return "gap"
        self._apply(notice)
        return "applied"

    def apply_snapshot(self, parts: Sequence[KvSnapshot]) -> bool:
        """Applies all parts of a snapshot, in the order in which they were requested.

        Then it applies the kept notices after the first part's number. Later parts may include
        some of them already; applying these twice is harmless. Returns False when a notice is
        missing: then another snapshot is needed.
        """
        if self.index is not None:
            held = {key for part in parts for key in part.held}
            self.index.replace(self.lease_id, held, [key for part in parts for key in part.cut])
        self.number = parts[0].number
        aside, self._aside = self._aside, []
        if "gap" in [self.receive(notice) for notice in aside]:
            self.invalidate()
            return False
        return True

    def _put_aside(self, notice: KvNotice) -> None:
        if len(self._aside) >= _MAX_ASIDE:
            self._aside.clear()  # the gap is detected when the rest is applied
        self._aside.append(notice)

    def _apply(self, notice: KvNotice) -> None:
        self.number = notice.number
        if self.index is not None:
            for change in notice.changes:
                self._change(self.index, change)

    def _change(self, index: KvIndex, change: KvChange) -> None:
        match change:
            case KvStored(hashes):
                index.stored(self.lease_id, hashes)
            case KvRemoved(hashes, cut):
                index.removed(self.lease_id, hashes, cut)
            case _:
                index.replace(self.lease_id, set())

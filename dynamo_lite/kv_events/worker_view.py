"""What a router knows of one worker, and how its notices and snapshots become that."""

from collections.abc import Sequence

from dynamo_lite.policy.kv_index import KvIndex
from dynamo_lite.protocol.kv import KvChange, KvNotice, KvRemoved, KvSnapshot, KvStored, Load

#: Notices that are put aside while a snapshot is fetched.
_MAX_ASIDE = 10_000


class Peer:
    """Bookkeeping only: it asks for nothing.

    number: of the last notice that is in the index; None while there is no snapshot, or
    notices after the last one are missing. load: as it said last, at `heard_at` (by the
    caller's clock). index: where its blocks are known.
    """

    def __init__(self, lease_id: int, model: str):
        self.lease_id, self.model = lease_id, model
        self.number: int | None = None
        self.load: Load | None = None
        self.heard_at = 0.0
        self.block_size = 0
        self.index: KvIndex | None = None
        self._aside: list[KvNotice] = []

    def __repr__(self) -> str:
        return f"<Peer {self.lease_id:x} number={self.number} aside={len(self._aside)}>"

    def doubt(self) -> None:
        """Notices may be missing: what is known is kept, and a snapshot is needed."""
        self.number = None
        self._aside.clear()

    def take(self, notice: KvNotice) -> str:
        """What became of it: "applied", "late" (dropped), "gap" or "aside": a snapshot is
        needed, before which it cannot be applied."""
        if self.number is None:
            self._put_aside(notice)
            return "aside"
        if notice.number <= self.number:
            return "late"
        if notice.number > self.number + 1:
            self.doubt()
            self._put_aside(notice)
            return "gap"
        self._apply(notice)
        return "applied"

    def settle(self, parts: Sequence[KvSnapshot]) -> bool:
        """Takes all parts of a snapshot, in the order in which they were asked for.

        The notices that were put aside follow, from the first part's number on; those that
        the later parts include, and that are still to come, may be applied again. False when
        one is missing: then another snapshot is needed.
        """
        if self.index is not None:
            held = {key for part in parts for key in part.held}
            self.index.replace(self.lease_id, held, [key for part in parts for key in part.cut])
        self.number = parts[0].number
        aside, self._aside = self._aside, []
        if "gap" in [self.take(notice) for notice in aside]:
            self.doubt()
            return False
        return True

    def _put_aside(self, notice: KvNotice) -> None:
        if len(self._aside) >= _MAX_ASIDE:
            self._aside.clear()  # the gap shows when they are applied
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

"""The order of one engine's batches: what is missing, what was seen, and when to start over. Pure.

An engine numbers its batches from 0 on. A subscriber may miss some (it came late, or was too slow),
and gets them by a replay; a replay may contain batches that also come by the subscription.
"""

from collections.abc import Sequence

from dynamo_lite.kv_events.engine_cache import EngineCache
from dynamo_lite.protocol.kv import KvChange

#: Limit on the blocks of one engine: more than fit into any device.
MAX_BLOCKS = 1 << 23


class Batches:
    """The blocks that one process of an engine holds, according to its batches so far."""

    def __init__(self) -> None:
        #: Number of the next batch.
        self.next = 0
        #: Events that could not be used.
        self.dropped = 0
        self._heard = -1
        self._cache = EngineCache(self._on_drop)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._cache)

    @property
    def block_size(self) -> int:
        """In tokens; 0 until it is known."""
        return self._cache.block_size

    def heard(self, number: int) -> bool:
        """Takes the number of a batch of the subscription. Returns whether another process
        begins with it, because numbers only grow. Then everything before it must be forgotten."""
        restarted = number <= self._heard
        self._heard = number
        return restarted

    def missing(self, number: int) -> bool:
        """Whether batches before this one have not come."""
        return number > self.next

    def take(self, number: int, payload: bytes) -> Sequence[KvChange] | None:
        """The changes of a batch; None if it is known already.

        After missing or malformed batches the changes begin with `KvCleared`, because the removed
        blocks are not known.
        """
        if number < self.next:
            return None
        changes = self._cache.clear() if number > self.next and len(self._cache) else []
        self.next = number + 1
        try:
            changes += self._cache.take(payload)
        except ValueError:
            self.dropped += 1
            return self._cache.clear()
        return changes if len(self._cache) <= MAX_BLOCKS else self._cache.clear()

    def _on_drop(self) -> None:
        self.dropped += 1

"""Which blocks of an attempt have arrived although its writers are lost.

Every write but the last has a notification that names its blocks and arrives with the
data. Writes may arrive in any order. So the blocks that count are those from the first one
up to the first gap, over all writers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_lite.protocol.prefill import Written
from dynamo_lite.protocol.records import KvRegion
from dynamo_lite.transfer.sharding import hole

#: For how many other claims of an attempt than its own notifications are kept.
_MAX_OTHER_CLAIMS = 4


@dataclass
class PartialCommits:
    """The notifications of one attempt and claim. A duplicate counts once."""

    #: By writing rank.
    commits: dict[int, Written] = field(default_factory=dict)
    #: By writing rank and first block.
    landed: dict[int, dict[int, Written]] = field(default_factory=dict)
    #: Number of notifications, including duplicates.
    notices: int = 0

    def add(self, notice: Written) -> None:
        self.notices += 1
        if notice.last:
            self.commits.setdefault(notice.rank, notice)
        else:
            self.landed.setdefault(notice.rank, {})[notice.first] = notice

    @property
    def complete(self) -> bool:
        """Whether all writers have committed, so that no write is in flight any more."""
        return len(self.commits) >= max((c.writers for c in self.commits.values()), default=1)


class ClaimedCommits:
    """The notifications of one attempt, by the claim of their writer.

    Only those of the attempt's claim count. Others are kept as well, because a notification may
    arrive before the step that names the claim.
    """

    def __init__(self) -> None:
        #: Of the attempt; 0 until it is known. Written by `claimed`.
        self.claim = 0
        self._by_claim: dict[int, PartialCommits] = {}
        #: How many notifications were dropped because they were written under another claim.
        self.dropped = 0

    @property
    def counting(self) -> PartialCommits:
        """What was written under the attempt's claim."""
        known = self._by_claim.get(self.claim) if self.claim else None
        return known or PartialCommits()

    def add(self, notice: Written) -> None:
        self._by_claim.setdefault(notice.claim, PartialCommits()).add(notice)
        others = [other for other in self._by_claim if other != self.claim]
        if len(others) > _MAX_OTHER_CLAIMS:
            self._drop(others[0])

    def claimed(self, claim: int) -> None:
        self.claim = claim

    def close(self) -> None:
        """The attempt has ended: drops the notifications of all other claims."""
        for other in [other for other in self._by_claim if other != self.claim]:
            self._drop(other)

    def _drop(self, claim: int) -> None:
        self.dropped += self._by_claim.pop(claim).notices


def whole_blocks(notices: PartialCommits, num_blocks: int, regions: Sequence[KvRegion]) -> int:
    """How many of the attempt's blocks, from the first one on, are known to hold their KV."""
    firsts: dict[int, Written | None] = {
        rank: landed.get(0) for rank, landed in notices.landed.items()
    }
    firsts |= notices.commits
    writers = [first for first in firsts.values() if first is not None]
    if not writers or len(writers) < max(len(firsts), *(first.writers for first in writers)):
        return 0
    if hole(regions, [part for first in writers for part in first.parts]):
        return 0
    return min(_run(notices, rank, num_blocks) for rank in firsts)


def _run(notices: PartialCommits, rank: int, num_blocks: int) -> int:
    """How many blocks one writer has brought, from the first one up to the first gap."""
    commit = notices.commits.get(rank)
    if commit is not None:
        return num_blocks if commit.num_blocks == num_blocks else 0
    landed, end = notices.landed[rank], 0
    while end in landed:
        step = landed[end]
        if step.num_blocks == 0 or end + step.num_blocks > num_blocks:
            break
        if step.parts != landed[0].parts:
            break
        end += step.num_blocks
    return end

"""The worker half of a decode engine: one rank's memory, open to writers.

It registers the KV pool and turns commit notifications into finished receives. It alone
decides whether an attempt's data arrived or was given up, and reports exactly one of the
two for each attempt. Several prefill ranks may write into it, each one its own heads and
layers: the data is complete when all of them have committed, under the attempt's claim.
Notifications that name another claim do not count.

Every write but the last has a notification that names its blocks and arrives with the data. Writes
may arrive in any order. So of an attempt whose writers are lost, the blocks count that come before
the first gap, over all writers.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.messages import DecodeStep, RankResults, WorkerReport
from dynamo_lite.disagg.metrics import LATE, MISMATCH
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.prefill import Written, decode_written
from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.sharding import hole

logger = logging.getLogger(__name__)

_MAX_EARLY = 1024
#: How many notifications of an attempt are kept until its claim is known; the last ones.
_MAX_UNCLAIMED = 256


@dataclass
class _Awaited:
    """An attempt that this engine waits for, and the notifications of its claim. A duplicate counts
    once."""

    request_id: str
    #: To be written, in order.
    blocks: tuple[int, ...]
    #: 0 until it is known.
    claim: int = 0
    #: By writing rank.
    commits: dict[int, Written] = field(default_factory=dict)
    #: By writing rank and first block.
    landed: dict[int, dict[int, Written]] = field(default_factory=dict)

    def add(self, notice: Written) -> None:
        if notice.last:
            self.commits.setdefault(notice.rank, notice)
        else:
            self.landed.setdefault(notice.rank, {})[notice.first] = notice

    @property
    def complete(self) -> bool:
        """Whether all writers have committed, so that no write is in flight any more."""
        return len(self.commits) >= max((c.writers for c in self.commits.values()), default=1)


class DecodeRank:
    """own: this rank's memory. max_early: of how many attempts notifications are kept before the
    attempt, or its claim, is known; the step that names it may still come.

    An attempt counts as lost if the commits of its writers do not bring each byte of its blocks
    once.
    """

    def __init__(self, mover: Mover, own: RankMetadata, *, max_early: int = _MAX_EARLY):
        self._mover, self._own = mover, own
        self.stats = Counters()
        self._awaited: dict[str, _Awaited] = {}
        self._early: dict[str, deque[Written]] = {}
        self._max_early = max_early
        self._log_limit = LogLimit()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._landed: dict[str, int] = {}

    def step(self, step: DecodeStep) -> None:
        """Applies the message of the scheduler half, and the notifications that have come."""
        for attempt, request_id in step.expect.items():
            self._awaited[attempt] = _Awaited(request_id, step.blocks.get(attempt, ()))
        for attempt, claim in step.claims.items():
            self._claimed(attempt, claim)
        if step.poll or self._awaited:
            self.poll()
        for attempt, request_id in step.give_up:
            if (awaited := self._awaited.pop(attempt, None)) is not None:
                self._failed.add(request_id)
                self._landed[request_id] = _whole_blocks(awaited, self._own.regions)

    def poll(self) -> bool:
        """Applies the notifications that have come. Whether `results` has anything to report."""
        for notice in self._mover.notices():
            self._add_notice(notice)
        for attempt in [a for a, awaited in self._awaited.items() if awaited.complete]:
            self._finish(attempt, self._awaited.pop(attempt))
        return bool(self._received or self._failed)

    def results(self) -> RankResults:
        """The requests whose KV was received or lost since the last call, each one once."""
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return RankResults(received=received, lost=failed)

    def report(self) -> WorkerReport | None:
        """How many blocks have arrived of each request that the last `results` called lost; 0 after
        a mismatch."""
        if not self._landed:
            return None
        landed, self._landed = self._landed, {}
        return WorkerReport(landed=landed)

    def close(self) -> None:
        self._mover.close()

    def _add_notice(self, payload: bytes) -> None:
        try:
            notice = decode_written(payload)
        except ProtocolError as exc:
            self.stats.drop("notice")
            self._log_limit.log(logger, "dropped an invalid NIXL notification: %s", exc)
            return
        if notice.attempt not in self._awaited:
            self.stats.add(LATE)
        self._take(notice)

    def _claimed(self, attempt: str, claim: int) -> None:
        if (awaited := self._awaited.get(attempt)) is not None:
            awaited.claim = claim
            for notice in self._early.pop(attempt, ()):
                self._take(notice)

    def _take(self, notice: Written) -> None:
        awaited = self._awaited.get(notice.attempt)
        if awaited is None or not awaited.claim:
            self._early.setdefault(notice.attempt, deque(maxlen=_MAX_UNCLAIMED)).append(notice)
            if len(self._early) > self._max_early:
                del self._early[next(iter(self._early))]
        elif notice.claim == awaited.claim:
            awaited.add(notice)
        else:
            self.stats.drop("unclaimed")
            text = "request %s: attempt %s: dropped the notification of a write under another claim"
            self._log_limit.log(logger, text, awaited.request_id, notice.attempt)

    def _finish(self, attempt: str, awaited: _Awaited) -> None:
        """All writers have committed."""
        mismatch = _mismatch(awaited, self._own.regions)
        if mismatch is None:
            self._received.add(awaited.request_id)
            return
        self.stats.add(MISMATCH)
        logger.error(
            "request %s: attempt %s: its commits do not fit its blocks, it is computed locally: %s",
            awaited.request_id,
            attempt,
            mismatch,
        )
        self._failed.add(awaited.request_id)
        # Other ranks may report blocks of this attempt as landed. A block enters the prefix
        # cache for all ranks, so this rank must say that it has none.
        self._landed[awaited.request_id] = 0


def _mismatch(awaited: _Awaited, regions: Sequence[KvRegion]) -> str | None:
    """What is wrong with the commits; None if nothing is."""
    commits = list(awaited.commits.values())
    for commit in commits:
        if commit.num_blocks != len(awaited.blocks):
            return f"rank {commit.rank}: {commit.num_blocks} blocks, not {len(awaited.blocks)}"
    return hole(regions, [part for commit in commits for part in commit.parts])


def _whole_blocks(awaited: _Awaited, regions: Sequence[KvRegion]) -> int:
    """How many of the attempt's blocks, from the first one on, are known to hold their KV."""
    firsts: dict[int, Written | None] = {
        rank: landed.get(0) for rank, landed in awaited.landed.items()
    }
    firsts |= awaited.commits
    writers = [first for first in firsts.values() if first is not None]
    if not writers or len(writers) < max(len(firsts), *(first.writers for first in writers)):
        return 0
    if hole(regions, [part for first in writers for part in first.parts]):
        return 0
    return min(_run(awaited, rank) for rank in firsts)


def _run(awaited: _Awaited, rank: int) -> int:
    """How many blocks one writer has brought, from the first one up to the first gap."""
    commit, num_blocks = awaited.commits.get(rank), len(awaited.blocks)
    if commit is not None:
        return num_blocks if commit.num_blocks == num_blocks else 0
    landed, end = awaited.landed[rank], 0
    while end in landed:
        step = landed[end]
        if step.num_blocks == 0 or end + step.num_blocks > num_blocks:
            break
        if step.parts != landed[0].parts:
            break
        end += step.num_blocks
    return end

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
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_lite.disagg.counters import LATE, MISMATCH, Counters
from dynamo_lite.disagg.messages import DecodeStep, RankResults, WorkerReport
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.prefill import Written, decode_written
from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.sharding import hole

logger = logging.getLogger(__name__)

_MAX_EARLY = _MAX_ENDED = 1024
#: How many notifications of an attempt are kept until its claim is known.
_MAX_UNCLAIMED = 256


@dataclass
class _Arrived:
    """The notifications of one attempt. A duplicate counts once."""

    #: Of the attempt; 0 until it is known. A notification may arrive before the step that names it.
    claim: int = 0
    unclaimed: deque[Written] = field(default_factory=deque)
    #: By writing rank.
    commits: dict[int, Written] = field(default_factory=dict)
    #: By writing rank and first block.
    landed: dict[int, dict[int, Written]] = field(default_factory=dict)
    #: How many were dropped because they were written under another claim.
    dropped: int = 0

    def add(self, notice: Written) -> None:
        if not self.claim:
            self.unclaimed.append(notice)
            if len(self.unclaimed) > _MAX_UNCLAIMED:
                self.unclaimed.popleft()
                self.dropped += 1
        elif notice.claim != self.claim:
            self.dropped += 1
        elif notice.last:
            self.commits.setdefault(notice.rank, notice)
        else:
            self.landed.setdefault(notice.rank, {})[notice.first] = notice

    def claimed(self, claim: int) -> None:
        self.claim = claim
        unclaimed, self.unclaimed = self.unclaimed, deque()
        for notice in unclaimed:
            self.add(notice)

    @property
    def complete(self) -> bool:
        """Whether all writers have committed, so that no write is in flight any more."""
        return len(self.commits) >= max((c.writers for c in self.commits.values()), default=1)


@dataclass
class _Awaited:
    """An attempt that this engine waits for."""

    request_id: str
    #: To be written, in order.
    blocks: tuple[int, ...]
    notices: _Arrived


class DecodeRank:
    """own: this rank's memory. max_early: for how many unknown attempts
    notifications are kept; the step that names them may still come. max_ended: how many ended
    attempts are remembered, so that their late notifications are counted.

    An attempt counts as lost if the commits of its writers do not bring each byte of its blocks
    once.
    """

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata | None = None,
        *,
        max_early: int = _MAX_EARLY,
        max_ended: int = _MAX_ENDED,
    ):
        self._max_early, self._max_ended = max_early, max_ended
        self._mover, self._own = mover, own
        self.stats = Counters()
        self._awaited: dict[str, _Awaited] = {}
        self._early: OrderedDict[str, _Arrived] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._log_limit = LogLimit()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._landed: dict[str, int] = {}

    def step(self, step: DecodeStep) -> None:
        """Applies the message of the scheduler half, and the notifications that have come."""
        for attempt, request_id in step.expect.items():
            early = self._early.pop(attempt, None) or _Arrived()
            self._awaited[attempt] = _Awaited(request_id, step.blocks.get(attempt, ()), early)
        for attempt, claim in step.claims.items():
            if (awaited := self._awaited.get(attempt)) is not None:
                awaited.notices.claimed(claim)
        if step.poll or self._awaited:
            self.poll()
        for attempt, request_id in step.give_up:
            if (awaited := self._awaited.pop(attempt, None)) is not None:
                self._failed.add(request_id)
                self._landed[request_id] = self._complete_blocks(awaited)
                self._close(attempt, awaited)

    def poll(self) -> bool:
        """Applies the notifications that have come. Whether `results` has anything to report."""
        for notice in self._mover.notices():
            self._add_notice(notice)
        for attempt in [a for a, w in self._awaited.items() if w.notices.complete]:
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
            if self._log_limit.allow() is not None:
                logger.warning("dropped an invalid NIXL notification: %s", exc)
            return
        if (awaited := self._awaited.get(notice.attempt)) is not None:
            awaited.notices.add(notice)
        elif notice.attempt in self._ended:
            self.stats.add(LATE)
        else:
            self._early.setdefault(notice.attempt, _Arrived()).add(notice)
            if len(self._early) > self._max_early:
                self._early.popitem(last=False)
                self.stats.add(LATE)

    def _close(self, attempt: str, awaited: _Awaited) -> None:
        """The attempt has ended for this rank."""
        if dropped := awaited.notices.dropped + len(awaited.notices.unclaimed):
            self.stats.drop("unclaimed", dropped)
            if self._log_limit.allow() is not None:
                logger.warning(
                    "request %s: attempt %s: dropped %d NIXL notifications of writes that were not"
                    " made under its claim",
                    awaited.request_id,
                    attempt,
                    dropped,
                )
        self._ended[attempt] = None
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def _finish(self, attempt: str, awaited: _Awaited) -> None:
        """All writers have committed."""
        self._close(attempt, awaited)
        mismatch = None if self._own is None else self._mismatch(self._own.regions, awaited)
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

    def _mismatch(self, regions: tuple[KvRegion, ...], awaited: _Awaited) -> str | None:
        """What is wrong with the commits; None if nothing is."""
        commits = list(awaited.notices.commits.values())
        for commit in commits:
            if commit.num_blocks != len(awaited.blocks):
                return f"rank {commit.rank}: {commit.num_blocks} blocks, not {len(awaited.blocks)}"
        return hole(regions, [part for commit in commits for part in commit.parts])

    def _complete_blocks(self, awaited: _Awaited) -> int:
        if self._own is None:
            return 0
        return _whole_blocks(awaited.notices, len(awaited.blocks), self._own.regions)


def _whole_blocks(notices: _Arrived, num_blocks: int, regions: Sequence[KvRegion]) -> int:
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


def _run(notices: _Arrived, rank: int, num_blocks: int) -> int:
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

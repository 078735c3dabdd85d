"""The worker half of a decode engine: one rank's memory, open to writers.

It registers the KV pool and turns commit notifications into finished receives. It alone
decides whether an attempt's data arrived or was given up, and reports exactly one of the
two for each attempt. Several prefill ranks may write into it, each one its own heads and
layers: the data is complete when all of them have committed, under the attempt's claim.
Notifications that name another claim do not count.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

from dynamo_lite.disagg.counters import LATE, MISMATCH, Counters
from dynamo_lite.disagg.decode.partial_commits import ClaimedCommits, whole_blocks
from dynamo_lite.disagg.messages import DecodeStep, RankResults, WorkerReport
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.prefill import decode_written
from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.sharding import hole

logger = logging.getLogger(__name__)

_MAX_EARLY = _MAX_ENDED = 1024


@dataclass
class _Awaited:
    """An attempt that this engine waits for."""

    request_id: str
    #: To be written, in order.
    blocks: tuple[int, ...]
    notices: ClaimedCommits


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
        self._early: OrderedDict[str, ClaimedCommits] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._log_limit = LogLimit()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._landed: dict[str, int] = {}
        self._cached: dict[str, int] = {}

    def step(self, step: DecodeStep) -> None:
        """Applies the message of the scheduler half, and the notifications that have come."""
        for attempt, request_id in step.expect.items():
            early = self._early.pop(attempt, None) or ClaimedCommits()
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
        for attempt in [a for a, w in self._awaited.items() if w.notices.counting.complete]:
            self._finish(attempt, self._awaited.pop(attempt))
        return bool(self._received or self._failed)

    def results(self) -> RankResults:
        """The requests whose KV was received or lost since the last call, each one once."""
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return RankResults(received=received, lost=failed)

    def report(self) -> WorkerReport | None:
        """How many blocks have arrived of each request that the last `results` called lost, 0
        after a mismatch; and how many tokens of a received one were cached at its writer."""
        if not (self._landed or self._cached):
            return None
        landed, self._landed = self._landed, {}
        cached, self._cached = self._cached, {}
        return WorkerReport(landed=landed, cached=cached)

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
            self._early.setdefault(notice.attempt, ClaimedCommits()).add(notice)
            if len(self._early) > self._max_early:
                self._early.popitem(last=False)
                self.stats.add(LATE)

    def _close(self, attempt: str, awaited: _Awaited) -> None:
        """The attempt has ended for this rank."""
        awaited.notices.close()
        if dropped := awaited.notices.dropped:
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
            commits = awaited.notices.counting.commits.values()
            if cached := max(commit.cached_tokens for commit in commits):
                self._cached[awaited.request_id] = cached
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
        commits = list(awaited.notices.counting.commits.values())
        for commit in commits:
            if commit.num_blocks != len(awaited.blocks):
                return f"rank {commit.rank}: {commit.num_blocks} blocks, not {len(awaited.blocks)}"
        return hole(regions, [part for commit in commits for part in commit.parts])

    def _complete_blocks(self, awaited: _Awaited) -> int:
        if self._own is None:
            return 0
        return whole_blocks(awaited.notices.counting, len(awaited.blocks), self._own.regions)

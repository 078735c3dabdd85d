"""The worker half of a decode engine: one rank's memory, open to writers.

It registers the KV pool and turns commit notices into finished receives. It is
the only judge of whether an attempt's data arrived or was given up: exactly one
of the two is reported for each.
"""

import logging
from collections import OrderedDict

from dynamo_lite.engine.remote_prefill.counts import LATE, MISMATCH, Counts
from dynamo_lite.engine.remote_prefill.messages import DecodeStep, RankResults
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.prefill import Committed, decode_committed
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.digest import ReadMemory, checksum, read_dram

logger = logging.getLogger(__name__)

#: Notices kept for attempts that this rank has not been told of yet.
_MAX_EARLY = 1024
#: Attempts remembered as given up, so that their late notices are counted as such.
_MAX_GIVEN_UP = 1024


class DecodeRank:
    """own: this rank's memory, rank: its index; read: reads from it.

    A commit whose blocks are not what its writer has sent counts as lost.
    """

    def __init__(
        self,
        mover: Mover,
        own: RankMetadata | None = None,
        rank: int = 0,
        read: ReadMemory = read_dram,
    ):
        self._mover, self._own, self._rank, self._read = mover, own, rank, read
        self.stats = Counts()
        self._expected: dict[str, str] = {}
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._early: OrderedDict[str, Committed] = OrderedDict()
        self._given_up: OrderedDict[str, None] = OrderedDict()
        self._log_limit = LogLimit()
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def step(self, step: DecodeStep) -> None:
        """Takes the scheduler half's word, and the notices that have come."""
        self._expected.update(step.expect)
        self._blocks.update(step.blocks)
        if step.poll or step.expect or self._expected:
            for notice in self._mover.notices():
                self._note(notice)
        for attempt in [a for a in self._early if a in self._expected]:
            self._arrived(self._early.pop(attempt))
        for attempt, request_id in step.give_up:
            self._blocks.pop(attempt, None)
            if self._expected.pop(attempt, None) is not None:
                self._failed.add(request_id)
                self._given_up[attempt] = None
        while len(self._given_up) > _MAX_GIVEN_UP:
            self._given_up.popitem(last=False)

    def results(self) -> RankResults:
        """What was settled since the last call; each request once."""
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return RankResults(received=received, lost=failed)

    def close(self) -> None:
        self._mover.close()

    def _note(self, notice: bytes) -> None:
        try:
            commit = decode_committed(notice)
        except ProtocolError as exc:
            self.stats.drop("notice")
            if self._log_limit.allow() is not None:
                logger.warning("foreign NIXL notice dropped: %s", exc)
            return
        if commit.attempt in self._expected:
            self._arrived(commit)
        elif commit.attempt in self._given_up:
            del self._given_up[commit.attempt]
            self.stats.add(LATE)
        else:
            self._early[commit.attempt] = commit
            if len(self._early) > _MAX_EARLY:
                self._early.popitem(last=False)
                self.stats.add(LATE)

    def _arrived(self, commit: Committed) -> None:
        """The writer has finished; whether well is looked at before anybody uses the KV."""
        request_id = self._expected.pop(commit.attempt)
        wrong = self._wrong(commit, self._blocks.pop(commit.attempt, ()))
        if wrong is None:
            self._received.add(request_id)
            return
        self.stats.add(MISMATCH)
        logger.error(
            "request %s: its KV is computed here, the commit of attempt %s does not hold: %s",
            request_id,
            commit.attempt,
            wrong,
        )
        self._failed.add(request_id)

    def _wrong(self, commit: Committed, blocks: tuple[int, ...]) -> str | None:
        """What does not agree with the commit; None when all does."""
        if self._own is None:
            return None
        if commit.rank != self._rank or commit.num_blocks != len(blocks):
            return (
                f"{commit.num_blocks} blocks by rank {commit.rank},"
                f" not {len(blocks)} by rank {self._rank}"
            )
        if any(position >= len(blocks) for position in commit.sampled):
            return f"sampled blocks {commit.sampled} of {len(blocks)}"
        sampled = [blocks[position] for position in commit.sampled]
        found = checksum(self._own.regions, sampled, self._read)
        if sampled and found != commit.checksum:
            return f"checksum {found:08x} of blocks {sampled}, not {commit.checksum:08x}"
        return None

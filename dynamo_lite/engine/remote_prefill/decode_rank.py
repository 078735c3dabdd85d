"""The worker half of a decode engine: one rank's memory, open to writers.

It registers the KV pool and turns commit notices into finished receives. It is
the only judge of whether an attempt's data arrived or was given up: exactly one
of the two is reported for each.
"""

import logging
from collections import OrderedDict

from dynamo_lite.engine.remote_prefill.counts import LATE, Counts
from dynamo_lite.engine.remote_prefill.messages import DecodeStep, RankResults
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.prefill import decode_committed
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.transfer.base import Mover

logger = logging.getLogger(__name__)

#: Notices kept for attempts that this rank has not been told of yet.
_MAX_EARLY = 1024
#: Attempts remembered as given up, so that their late notices are counted as such.
_MAX_GIVEN_UP = 1024


class DecodeRank:
    def __init__(self, mover: Mover):
        self._mover = mover
        self.stats = Counts()
        self._expected: dict[str, str] = {}
        self._early: OrderedDict[str, None] = OrderedDict()
        self._given_up: OrderedDict[str, None] = OrderedDict()
        self._log_limit = LogLimit()
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def step(self, step: DecodeStep) -> None:
        """Takes the scheduler half's word, and the notices that have come."""
        self._expected.update(step.expect)
        if step.poll or step.expect or self._expected:
            for notice in self._mover.notices():
                self._note(notice)
        for attempt in [a for a in self._early if a in self._expected]:
            del self._early[attempt]
            self._received.add(self._expected.pop(attempt))
        for attempt, request_id in step.give_up:
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
            attempt = decode_committed(notice).attempt
        except ProtocolError as exc:
            self.stats.drop("notice")
            if self._log_limit.allow() is not None:
                logger.warning("foreign NIXL notice dropped: %s", exc)
            return
        request_id = self._expected.pop(attempt, None)
        if request_id is not None:
            self._received.add(request_id)
            return
        if attempt in self._given_up:
            del self._given_up[attempt]
            self.stats.add(LATE)
            return
        self._early[attempt] = None
        if len(self._early) > _MAX_EARLY:
            self._early.popitem(last=False)
            self.stats.add(LATE)

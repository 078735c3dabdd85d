"""Looks at the queued remote prefills of a decode engine, and takes one back where that pays.

It looks when something has changed: a new reading of the queue, another engine's backlog, the
prefill workers. The rule is in `policy/decision/steal_back.py`. A prompt that was taken back is
computed here and gets no other remote prefill, as after every remote prefill that no other worker
can repeat.
"""

import logging
import threading
from collections.abc import Mapping

from dynamo_lite.disagg.counters import STEAL_LOOK, Counters
from dynamo_lite.disagg.decode.backlog import BacklogExchange
from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.prefill_rate import PrefillRate
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.shared_state import LockedLedger
from dynamo_lite.policy.attempts.instructions import Instruction
from dynamo_lite.policy.decision.steal_back import QueuedPrefill, StealReason, TakeBack, look

logger = logging.getLogger(__name__)

#: The shortest time between two looks: by then the results of other engines' looks are known. With
#: many engines it is longer; see `notice_period_s`.
_PERIOD_S = 0.1
#: The longest time between two looks, if nothing changes.
_QUIET_PERIOD_S = 1.0


class StealBack:
    """Runs on the engine's thread. news: set by any thread when something has changed."""

    def __init__(
        self,
        news: threading.Event,
        book: LockedLedger,
        prefills: RemotePrefills,
        backlog: BacklogExchange,
        live: LiveThresholds,
        rate: PrefillRate,
        stats: Counters,
    ):
        self._news, self._book, self._prefills, self._backlog = news, book, prefills, backlog
        self._live, self._rate, self._stats = live, rate, stats
        self._looks = 0
        self._looked_at = 0.0
        #: The most requests that decoded in one step since the last look.
        self._streams = 0
        #: The remote prefill that was taken back last.
        self._taken: RemotePrefill | None = None

    def step(self, scheduled: Mapping[str, int], now: float) -> list[Instruction]:
        """Called in every step. scheduled: how many tokens it computes, by request. Returns the
        ledger's instructions."""
        computing = self._prefills.computing
        streams = len(scheduled) - sum(request_id in scheduled for request_id in computing)
        self._streams = max(self._streams, streams)
        age_s = now - self._looked_at
        if age_s < max(_PERIOD_S, self._backlog.period_s):
            return []
        if age_s < _QUIET_PERIOD_S and not self._news.is_set():
            return []
        self._news.clear()
        self._looked_at, streams, self._streams = now, self._streams, 0
        if not self._live.now.steal_back:
            return []
        queued = self._prefills.queued()
        return self._look(queued, streams, now) if queued else []

    def _look(self, queued: list[RemotePrefill], streams: int, now: float) -> list[Instruction]:
        self._looks += 1
        taking = self._taken is not None and self._taken.parked
        verdict = look(
            [self._costs(prefill, now) for prefill in queued],
            streams=streams,
            prefill_here=taking or self._prefills.prefills_here,
            number=self._looks,
        )
        reason, instructions = verdict.reason, list[Instruction]()
        if isinstance(verdict, TakeBack):
            wait_s, target_s = verdict.wait_s, verdict.target_s
            why = f"{reason.value}, about {wait_s:.2f} s more; {target_s:.2f} s here"
            with self._book.lock:
                instructions = self._book.ledger.steal(verdict.attempt, why)
            if instructions:
                self._taken = next(one for one in queued if one.attempt == verdict.attempt)
                request_id, waited_s = self._taken.request_id, now - self._taken.asked_at
                about = request_id, verdict.attempt, waited_s, why
                logger.info("request %s: attempt %s is taken back after %.2f s: %s", *about)
            else:
                reason = StealReason.GONE
        self._stats.add(f"{STEAL_LOOK}/{reason.value}")
        return instructions

    def _costs(self, prefill: RemotePrefill, now: float) -> QueuedPrefill:
        inputs = prefill.decided.inputs
        guesses = [] if inputs.queue is None else [inputs.queue.wait_s]
        expected = [s for s in (*guesses, self._rate.remote_fixed_s) if s is not None]
        return QueuedPrefill(
            attempt=prefill.attempt,
            local_s=self._rate.local_s(inputs.uncached_tokens),
            waited_s=now - prefill.asked_at,
            expected_s=max(expected, default=None),
            ahead_s=self._backlog.ahead_s(prefill),
        )

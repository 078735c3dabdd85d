"""From when on the writer of an attempt counts as lost, and from when on as dead.

The writer of a claimed or quarantined attempt may leave. That is not a state of the attempt, but
three times:

    keys vanish ──► leaving second ──► lost: the attempt is withdrawn
        │             ▲    │
        │             │    └─promise to stay `for_s`: lost at its end
        │             └────── (each promise replaces the one before)
        ├──writer_grace_s──► no write starts ──writer_grace_s──► dead: the blocks are released
        └─keys are back, same lease: nothing happened

The leaving second is for a revoked worker, which can promise to finish what it has begun. A lease
may be revoked while its worker is cut off, which then writes until its fence closes. That its
component's process has ended does not show either that its engine's has. A writer whose engine
died reports that, and counts as lost at once; other processes of the engine may end later. Cancels
of quarantined attempts are repeated, since messages get lost.
"""

import math


class WriterDeadlines:
    """Those of one attempt; they do not count until its writer leaves.

    writer_grace_s, leaving_s: see `Ledger`. All times are monotonic seconds.
    """

    def __init__(self, writer_grace_s: float, leaving_s: float):
        self._grace_s, self._leaving_s = writer_grace_s, leaving_s
        self._stays_until = -math.inf
        self._lost_at: float | None = None
        #: When the last write has started, at the latest; counts once the writer is lost.
        self._last_start = -math.inf
        self._engine_died = False
        self._cancel_at: float | None = None

    def keys_gone(self, now: float) -> None:
        if not self._engine_died:
            self._lost_at = max(now + self._leaving_s, self._stays_until)
            self._last_start = now + self._grace_s

    def keys_back(self) -> None:
        if not self._engine_died:
            self._lost_at = None

    def ended(self, now: float) -> None:
        """Its component's process has ended after its keys vanished. It keeps no promise, but its
        engine may write until the end of an accepted one."""
        self._lost_at = now
        self._last_start = max(self._last_start, self._stays_until)

    def engine_died(self, now: float) -> None:
        """Its engine has ended, or is about to. Only the first report counts."""
        if not self._engine_died:
            self._engine_died = True
            self._lost_at, self._last_start = now, now + self._grace_s

    def promised(self, until: float) -> None:
        """It starts no write after `until`, or after the end of its fence if that is later. A
        promise that arrives before its keys vanish counts from then on."""
        self._stays_until = until
        if self._lost_at is not None:
            self._lost_at = until

    def lost(self, now: float) -> bool:
        """Whether its requests stop waiting."""
        return self._lost_at is not None and now >= self._lost_at

    def dead(self, now: float) -> bool:
        """Whether none of its writes can land any more."""
        if self._lost_at is None:
            return False
        return now >= max(self._lost_at, self._last_start) + self._grace_s

    def cancels_again(self, now: float) -> bool:
        """Whether the last cancel of its attempt was long ago, so that one more is sent. The first
        call counts as the first cancel."""
        due = self._cancel_at is not None and now >= self._cancel_at
        if self._cancel_at is None or due:
            self._cancel_at = now + self._grace_s
        return due

"""From when on the writer of an attempt counts as lost, and from when on as dead.

The writer of a claimed or quarantined attempt may leave. That is not a state of the attempt, but
two deadlines:

    keys vanish ──► leaving second ──► lost: withdrawn ──writer_grace_s──► dead: released
        │             ▲    │
        │             │    └─promise to stay `for_s`: lost and dead count from its end
        │             └────── (each promise replaces the one before)
        └─keys are back, same lease: nothing happened

The leaving second is for a revoked worker, which can promise to finish what it has begun. A writer
whose engine died reports that, and counts as lost at once. Cancels of quarantined attempts are
repeated, since messages get lost.
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
        self._cancel_at: float | None = None

    def keys_gone(self, now: float) -> None:
        self._lost_at = max(now + self._leaving_s, self._stays_until)

    def keys_back(self) -> None:
        self._lost_at = None

    def ended(self, now: float) -> None:
        """It starts no write any more, whatever it has promised. An earlier one may still land."""
        self._lost_at = now

    def promised(self, until: float) -> None:
        """It starts no write after `until`. A promise that arrives before its keys vanish counts
        from then on."""
        self._stays_until = until
        if self._lost_at is not None:
            self._lost_at = until

    def lost(self, now: float) -> bool:
        """Whether its requests stop waiting."""
        return self._lost_at is not None and now >= self._lost_at

    def dead(self, now: float) -> bool:
        """Whether none of its writes can land any more."""
        return self._lost_at is not None and now >= self._lost_at + self._grace_s

    def cancels_again(self, now: float) -> bool:
        """Whether it was silent for long after the last cancel of its attempt, so that one more
        is sent. The first call counts as the first cancel."""
        due = self._cancel_at is not None and now >= self._cancel_at
        if self._cancel_at is None or due:
            self._cancel_at = now + self._grace_s
        return due

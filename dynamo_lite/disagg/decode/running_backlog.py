"""The backlog of this decode engine as running totals.

If the totals were summed over all records, decisions would get slower the more prompts wait.
"""

from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.policy.decision.backlog import BacklogTotals
from dynamo_lite.protocol.backlog import Lane


class RunningBacklog:
    """Call with the lock of `RemotePrefills` held."""

    def __init__(self) -> None:
        self._queued_jobs, self._queued_tokens = dict.fromkeys(Lane, 0), dict.fromkeys(Lane, 0)
        self._claimed_jobs = self._claimed_tokens = 0
        #: Counters since the start, see `Backlog`.
        self.asked_tokens = self.overflow_tokens = 0

    def add(self, prefill: RemotePrefill) -> None:
        self._count(prefill, 1)

    def remove(self, prefill: RemotePrefill) -> None:
        """Call before the record changes."""
        self._count(prefill, -1)

    def totals(self) -> BacklogTotals:
        queued = {lane: self._queued_tokens[lane] for lane, n in self._queued_jobs.items() if n}
        jobs = sum(self._queued_jobs.values())
        return BacklogTotals(
            jobs,
            queued,
            self._claimed_jobs,
            self._claimed_tokens,
            self.asked_tokens,
            self.overflow_tokens,
        )

    def _count(self, prefill: RemotePrefill, by: int) -> None:
        if prefill.claimed_at is None:
            self._queued_jobs[prefill.lane] += by
            self._queued_tokens[prefill.lane] += by * prefill.job_tokens
        else:
            self._claimed_jobs += by
            self._claimed_tokens += by * prefill.job_tokens

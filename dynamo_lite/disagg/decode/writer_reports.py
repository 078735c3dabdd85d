"""Committed remote prefills whose writers have not reported yet that they are done.

The report comes after the KV, perhaps when the request has ended already. Counts and notes leave
the engine with a step only, so the engine makes steps for it for a while.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.stages import report_notice

#: Committed remote prefills that are kept until their writers report that they are done.
_MAX_UNREPORTED = 1024
#: How long an engine makes steps after a commit, for its writer's report to leave with one.
_REPORT_WITHIN_S = 5.0


class WriterReports:
    """Any thread. stats: receives the stage that a report ends. now: monotonic."""

    def __init__(self, stats: Counters, now: Callable[[], float]):
        self._stats, self._now = stats, now
        #: By attempt, oldest first.
        self._unreported: OrderedDict[str, RemotePrefill] = OrderedDict()
        #: Whether counts of a report wait for a step to carry them.
        self._to_carry = False
        self._lock = threading.Lock()

    def expect(self, prefill: RemotePrefill) -> None:
        """Its KV has come, before its writer's report."""
        with self._lock:
            self._unreported[prefill.attempt] = prefill
            if len(self._unreported) > _MAX_UNREPORTED:
                self._unreported.popitem(last=False)

    def arrived(self, attempt: str, took_s: float | None) -> None:
        """Ignored for attempts that are not expected. took_s: see `RemotePrefills.writer_done`."""
        with self._lock:
            prefill = self._unreported.get(attempt)
        if prefill is None:
            return
        if took_s is not None:
            report_notice(self._stats, prefill, took_s)
        with self._lock:
            self._unreported.pop(attempt, None)
            # Later the engine may be idle: the counts then leave with its next step.
            self._to_carry |= self._in_time(prefill)

    def stepped(self) -> None:
        """A step begins. It carries what was counted and noted so far."""
        self._to_carry = False

    @property
    def busy(self) -> bool:
        """Whether the engine must make steps because of a report."""
        with self._lock:
            if self._to_carry or not self._unreported:
                return self._to_carry
            return self._in_time(next(reversed(self._unreported.values())))

    def _in_time(self, prefill: RemotePrefill) -> bool:
        """Whether the engine makes steps for the report of a committed prefill's writer."""
        received_at = prefill.received_at
        return received_at is not None and self._now() - received_at < _REPORT_WITHIN_S

"""Counts how long the writes of a rank take, and notes spans of traced jobs."""

from dynamo_lite.disagg.counters import SECONDS, WRITTEN, Counters
from dynamo_lite.disagg.messages import BlockWrite
from dynamo_lite.disagg.prefill.outgoing import InFlightWrite, OutgoingAttempt
from dynamo_lite.disagg.span_notes import note_child


class WriteTimes:
    """rank: index of the writing rank. Only the first rank, which is on the scheduler's host,
    reports stages and spans.
    """

    def __init__(self, stats: Counters, rank: int):
        self._stats, self._reports = stats, rank == 0

    def started(self, attempt: OutgoingAttempt, write: BlockWrite, at: float) -> None:
        """The write starts: its blocks have been computed."""
        if not self._reports:
            return
        if write.last:
            self._stats.add_stage("compute", at - write.scheduled)
        # One span for each step, at the first of its writes.
        if write.trace is not None and write.began != attempt.began:
            attempt.began = write.began
            note_child(
                self._stats, "prefill chunk", write.trace, write.began, at, _attributes(write)
            )

    def ended(self, attempt: OutgoingAttempt, flight: InFlightWrite, at: float) -> None:
        self._stats.append(SECONDS, at - flight.started)
        attempt.written = at
        if not self._reports:
            return
        if flight.last:
            self._stats.add_stage("write", at - flight.started)
        if flight.of is not None and flight.of.trace is not None:
            note_child(
                self._stats, "transfer", flight.of.trace, flight.started, at, _attributes(flight.of)
            )

    def complete(self, attempt_id: str, attempt: OutgoingAttempt) -> None:
        """All writes of the attempt have ended without a failure."""
        if self._reports and attempt.written is not None:
            self._stats.append(WRITTEN, [attempt_id, attempt.written])


def _attributes(write: BlockWrite) -> dict[str, int | bool]:
    return {"dynamo_lite.blocks": len(write.remote_ids), "dynamo_lite.last": write.last}

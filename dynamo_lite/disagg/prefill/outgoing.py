"""The state of an attempt in the prefill rank that writes it, and how long its writes take."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_lite.disagg.counters import SECONDS, Counters
from dynamo_lite.disagg.messages import BlockWrite
from dynamo_lite.disagg.prefill.staging import StagingSlot
from dynamo_lite.disagg.span_notes import note_child
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.transfer.base import Transfer

#: Returns whether the step that fills the blocks has ended (work on a GPU is queued).
Ready = Callable[[], bool]


@dataclass
class InFlightWrite:
    """A write in flight."""

    write: Transfer
    #: Monotonic time of the start.
    started: float
    #: Whether it is the last write of the attempt.
    last: bool
    #: The staging slot that it reads from; None if it reads blocks.
    slot: StagingSlot | None
    of: BlockWrite


@dataclass
class OutgoingAttempt:
    """`BlockWrites` writes the fields, except where a field says otherwise."""

    #: Engine id of the decode engine.
    target: str
    #: Of its claim.
    cell: Cell
    #: The latest end of the claim that was seen, in seconds of CLOCK_BOOTTIME.
    until: float = 0.0
    #: Whether its request has finished, so that no write is added any more.
    ended: bool = False
    #: Writes that were not started.
    queue: deque[tuple[BlockWrite, Ready]] = field(default_factory=deque)
    in_flight: list[InFlightWrite] = field(default_factory=list)
    #: The staging slot of the first write in `queue`, if it has one.
    slot: StagingSlot | None = None
    #: The next write repeats blocks of earlier writes, and must start after they have ended.
    again: bool = False
    #: `BlockWrite.began` of the last step that has a span; written by `WriteTimes`.
    began: float = -1.0
    #: Why nothing more of the attempt is written.
    failure: str | None = None


class WriteTimes:
    """Counts how long the writes of a rank take, and notes spans of traced jobs.

    rank: index of the writing rank. Only the first rank, which is on the scheduler's host,
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

    def ended(self, flight: InFlightWrite, at: float) -> None:
        self._stats.append(SECONDS, at - flight.started)
        if not self._reports:
            return
        if flight.last:
            self._stats.add_stage("write", at - flight.started)
        if flight.of.trace is not None:
            note_child(
                self._stats, "transfer", flight.of.trace, flight.started, at, _attributes(flight.of)
            )


def _attributes(write: BlockWrite) -> dict[str, int | bool]:
    return {"dynamo_lite.blocks": len(write.remote_ids), "dynamo_lite.last": write.last}

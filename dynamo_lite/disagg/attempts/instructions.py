"""What the ledger's caller has to do about a remote prefill."""

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    """How a remote prefill ended for its request; the label of the counter."""

    COMMITTED = "committed"
    CORRUPT = "corrupt"  # written, but the commits do not fit the blocks
    REFUSED = "refused"  # the queue did not take it
    DEADLINE = "deadline"
    WRITER_FAILED = "writer_failed"
    WRITER_ABANDONED = "writer_abandoned"  # it returned the job without writing
    WRITER_UNUSABLE = "writer_unusable"  # it gave the job back: its link has failed
    WRITER_LOST = "writer_lost"  # its keys are gone, or its engine has died
    WRITER_SILENT = "writer_silent"  # no heartbeats, or unhealthy
    CANCELLED = "cancelled"
    NO_WRITER = "no_writer"  # the last prefill worker left, or none responds
    QUEUE_LOST = "queue_lost"  # the broker lost the queue's stream, and the jobs with it
    LEAVING = "leaving"  # this engine is draining
    TAKEN_BACK = "taken_back"  # not claimed in time


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job from the queue: it is not wanted any more."""

    sequence: int


@dataclass(frozen=True)
class CancelWriter:
    """Send the writer a cancel, which it answers with `WriterDone`. Repeated, since messages get
    lost."""

    writer_lease_id: int
    attempt: str


@dataclass(frozen=True)
class Hold:
    """Take own references on the blocks before the engine frees them."""

    attempt: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """Give those references back: no write can arrive any more."""

    attempt: str


@dataclass(frozen=True)
class GiveUp:
    """Stop waiting for the KV of this request: let the engine continue without it."""

    request_id: str
    attempt: str


@dataclass(frozen=True)
class Ended:
    """The request's remote prefill is over; for logs and counters."""

    request_id: str
    attempt: str
    outcome: Outcome
    #: The writer's own report, or how long the attempt was not claimed; empty if something else
    #: ended it.
    detail: str = ""


Instruction = DeleteJob | CancelWriter | Hold | Release | GiveUp | Ended

#: Instructions for the engine's step; the others are for the network.
FOR_ENGINE = (Hold, Release, GiveUp, Ended)

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
    WRITER_ABANDONED = "writer_abandoned"  # it gave the job back without writing
    WRITER_LOST = "writer_lost"  # its claim ran out, its keys are gone, or its engine has died
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
class Release:
    """Give the attempt's blocks back: no write can arrive in them any more."""

    attempt: str


@dataclass(frozen=True)
class Ended:
    """The request stops waiting for the attempt's KV."""

    request_id: str
    attempt: str
    outcome: Outcome
    #: The writer's own report, or how long the attempt was not claimed; empty if something else
    #: ended it.
    detail: str = ""


Instruction = DeleteJob | Release | Ended

"""What the ledger tells its caller to do about a remote prefill."""

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    """How a remote prefill ended for its request; the label of the counter."""

    COMMITTED = "committed"
    CORRUPT = "corrupt"  # written, but the blocks do not hold what the writer has sent
    REFUSED = "refused"  # the queue did not take it
    DEADLINE = "deadline"
    WRITER_FAILED = "writer_failed"
    WRITER_ABANDONED = "writer_abandoned"  # it gave the job back without writing it
    WRITER_UNUSABLE = "writer_unusable"  # its link to this engine has failed
    WRITER_LOST = "writer_lost"  # its keys are gone
    WRITER_SILENT = "writer_silent"  # no beats, or its engine does not work
    CANCELLED = "cancelled"
    NO_WRITER = "no_writer"  # the last prefill worker left, or none responds
    QUEUE_LOST = "queue_lost"  # the broker lost the queue's stream, and the jobs with it
    LEAVING = "leaving"  # this engine is on its way out


@dataclass(frozen=True)
class DeleteJob:
    """Take the job off the queue: nobody wants it."""

    sequence: int


@dataclass(frozen=True)
class CancelWriter:
    """Tell the writer to stop and to say when it has. Repeated: messages get lost."""

    writer_lease_id: int
    attempt: str


@dataclass(frozen=True)
class Hold:
    """Take references of our own on the blocks before the engine frees them."""

    attempt: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """Give those references back: no write can come any more."""

    attempt: str


@dataclass(frozen=True)
class GiveUp:
    """Stop waiting for the KV of this request: let the engine go on without it."""

    request_id: str
    attempt: str


@dataclass(frozen=True)
class Ended:
    """For the books: the request's remote prefill is over, one way or another.

    detail: what its writer has said of it; empty where the writer did not end it.
    """

    request_id: str
    attempt: str
    outcome: Outcome
    detail: str = ""


Instruction = DeleteJob | CancelWriter | Hold | Release | GiveUp | Ended

#: What an engine's step does; the others are for the network.
FOR_ENGINE = (Hold, Release, GiveUp, Ended)

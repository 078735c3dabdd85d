"""The state of one attempt, which the ledger keeps by its id:

    QUEUED ──claim──► CLAIMED ──received──────────────────────► (gone)
      │                  │ └──withdraw, its writer being done──► (gone)
      │ withdraw         │ withdraw
      ▼                  ▼
    (gone)          QUARANTINED ──writer done, or certainly dead──► (gone)

It says what a writer's claim, promise or report means in each state. The ledger says what must be
done.
"""

import enum
from dataclasses import dataclass

from dynamo_lite.disagg.attempts.writer_deadlines import WriterDeadlines


class AttemptState(enum.Enum):
    QUEUED = "queued"
    CLAIMED = "claimed"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class Refusal:
    """Why a claim or a promise was refused."""

    reason: str
    #: Another writer, or a later try, may get the claim.
    elsewhere: bool = False


@dataclass(frozen=True)
class Terms:
    """What the ledger knows of a grant; see `Grant`."""

    grant: int
    blocks: bytes
    for_s: float


@dataclass
class Attempt:
    request_id: str
    id: str
    #: All blocks that the writer may touch.
    block_ids: tuple[int, ...]
    #: Until when the request waits, in monotonic seconds.
    deadline: float
    writer_deadlines: WriterDeadlines
    #: When it was allocated, and how long it may wait while nothing is claimed.
    queued_at: float
    max_queue_wait_s: float
    state: AttemptState = AttemptState.QUEUED
    #: Of the job in the queue; None until the queue has confirmed it.
    sequence: int | None = None
    #: Digest of the blocks that the job names.
    offered: bytes = b""
    #: Lease id of the writer that holds the claim, or held it when the attempt was withdrawn.
    writer: int | None = None
    #: Number of its last claim; see `Claim`.
    claim_number: int = 0
    #: Id of that claim's grant.
    grant: int = 0
    #: Whether the writer has reported that it will not touch the blocks again.
    writer_done: bool = False

    def claim(
        self, writer_lease_id: int, now: float, number: int, grant: int, *, gone: bool
    ) -> Refusal | None:
        """See `Ledger.claim`. gone: whether the writer's lease is gone."""
        if self.state is AttemptState.QUARANTINED:
            return Refusal("withdrawn")
        if now >= self.deadline:
            return Refusal("past its deadline")
        if gone:
            return Refusal("the writer's lease is gone", elsewhere=True)
        if self.writer_done:
            return Refusal("written already")
        if self.state is AttemptState.CLAIMED and self.writer != writer_lease_id:
            return Refusal(f"claimed by {self.writer:x}", elsewhere=True)
        if number < self.claim_number:
            return Refusal("claimed again since")
        if self.state is AttemptState.QUEUED or number > self.claim_number:
            self.grant = grant
        self.state, self.writer, self.claim_number = AttemptState.CLAIMED, writer_lease_id, number
        return None

    def terms(self, now: float) -> Terms:
        """What its writer was granted."""
        return Terms(self.grant, self.offered, max(0.0, self.deadline - now))

    def promised(
        self, writer_lease_id: int, for_s: float, now: float, number: int
    ) -> Refusal | None:
        """See `Ledger.writer_stays`."""
        if self.writer is None:
            return Refusal("not claimed")
        if self.writer != writer_lease_id:
            return Refusal(f"claimed by {self.writer:x}")
        if self.claim_number != number:
            return Refusal(f"held by claim {self.claim_number}, not {number}")
        self.writer_deadlines.promised(now + for_s)
        return None

    def unclaimed_for_too_long(self, now: float, claimed_at: float) -> bool:
        """claimed_at: when any attempt was last claimed: until then the queue moved."""
        waits = self.state is AttemptState.QUEUED
        return waits and now - max(self.queued_at, claimed_at) >= self.max_queue_wait_s

    def unfinished_by(self, writer_lease_id: int) -> bool:
        """Whether this writer holds the claim, and has not reported that it is done."""
        return self.writer == writer_lease_id and not self.writer_done

    def ended_by(self, writer_lease_id: int, number: int, *, written: bool) -> bool:
        """Whether this writer's report ends the writing: that it is done under its claims up to
        `number`.

        Not if another writer holds the attempt, or this one by a later claim. A report without a
        claim is that of a writer whose claim never arrived; it cannot have written.
        """
        if self.writer is None:
            return not written
        return self.writer == writer_lease_id and number >= self.claim_number

    def withdraw(self) -> bool:
        """The request no longer waits. Returns whether the writer may still write: the blocks are
        then in quarantine."""
        if self.state is not AttemptState.CLAIMED or self.writer_done:
            return False
        self.state = AttemptState.QUARANTINED
        return True

"""The decode side's record of remote prefills: a pure state machine.

There is one entry per attempt, from the allocation of its blocks until no process can write into
them, or read the blocks of its prefix, any more.

    QUEUED ──claim──► HELD ──received───────────────────────────────► (gone)
      │                 │
      │ withdraw        │ withdraw
      ▼                 ▼
    (gone)          EXPIRING ──done, or the end of its claim and of its writes──► (gone)

A claim is a lease that its writer renews. Each answer keeps the blocks for the writer for another
`claim_s`. Nothing else lets it write, and nothing else lets it go on.

An attempt is withdrawn if the queue refused it, if no prefill worker is left, if it is not
received when its deadline or request ends, if its writer gave up or did not renew its claim, and
before a claim if this engine drains or no writer claims it in time. A writer that left or is silent
is a hint: it withdraws an attempt earlier, and never frees the attempt's blocks. A renewal of a
withdrawn attempt is refused, so its writer stops.

Methods are named after events, and return what must be done as instructions. The caller owns I/O
and clock. Times are monotonic seconds. Safety rests on two rules: a claim holds only while the
attempt is wanted, and a withdrawn attempt keeps its blocks until its writer is done, or its last
claim has run out and a write that was started under it has landed.
"""

import enum
import math
from dataclasses import dataclass, field

from dynamo_lite.disagg.decision.lanes import Lane


class Outcome(enum.Enum):
    """How a remote prefill ended for its request; the label of the counter."""

    COMMITTED = "committed"
    CORRUPT = "corrupt"  # written, but the commits do not fit the blocks
    REFUSED = "refused"  # the queue did not take it
    DEADLINE = "deadline"
    WRITER_FAILED = "writer_failed"
    WRITER_ABANDONED = "writer_abandoned"  # it gave the job back without writing
    WRITER_LOST = "writer_lost"  # its claim ran out, or its keys are gone
    WRITER_SILENT = "writer_silent"  # no heartbeats, or unhealthy
    CANCELLED = "cancelled"
    NO_WRITER = "no_writer"  # the last prefill worker left, or none responds
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

#: How long a claim holds after each answer, in seconds. A writer renews it twelve times as often.
CLAIM_S = 3.0
#: How long a writer whose keys are gone has to renew its claims: then it is leaving, not dead.
LEAVING_S = 0.5
#: How long a job may be unclaimed after a later one of its lane was claimed: the worker that it was
#: delivered to is lost, since each lane delivers in order, and each job once.
PASSED_S = 1.0


class AttemptState(enum.Enum):
    QUEUED = "queued"
    HELD = "held"
    EXPIRING = "expiring"


@dataclass
class Attempt:
    request_id: str
    id: str
    #: Until when the request waits.
    deadline: float
    #: When it was allocated, and how long it may wait while nothing is claimed.
    queued_at: float
    max_queue_wait_s: float
    state: AttemptState = AttemptState.QUEUED
    #: Of the job in the queue; None until the queue has confirmed it.
    sequence: int | None = None
    lane: Lane | None = None
    #: When a later job of its lane was claimed.
    passed_at: float = math.inf
    #: Id of its claim, and the lease id of its writer; 0: none has claimed it.
    claim: int = 0
    writer: int = 0
    #: The end of its claim: until then its writer may start writes.
    held_until: float = -math.inf
    #: When the request stops waiting for its writer: at the end of the claim, or earlier.
    wanted_until: float = math.inf
    #: Whether the writer has reported that all is written. The ranks report it soon.
    done: bool = False


@dataclass
class Ledger:
    """All remote prefills of one decode engine."""

    #: How long a write may take to land after its start, at most: the lease's time-to-live, see
    #: `serve/child_environment.py`.
    landing_s: float
    claim_s: float = CLAIM_S
    _attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    #: When an attempt was last claimed.
    _claimed_at: float = -math.inf

    def __repr__(self) -> str:
        rows = ", ".join(f"{each.id}:{each.state.value}" for each in self._attempts.values())
        return f"<Ledger {rows or 'empty'}>"

    @property
    def waiting(self) -> int:
        """Requests that wait for remote KV."""
        return sum(_waits(each) for each in self._attempts.values())

    @property
    def quarantined(self) -> int:
        """Withdrawn attempts whose blocks are not reused yet."""
        return sum(each.state is AttemptState.EXPIRING for each in self._attempts.values())

    @property
    def writers(self) -> frozenset[int]:
        """Leases of the writers that may still write."""
        alive = (AttemptState.HELD, AttemptState.EXPIRING)
        return frozenset(each.writer for each in self._attempts.values() if each.state in alive)

    def get(self, attempt: str) -> Attempt | None:
        """None for one that is unknown, or over."""
        return self._attempts.get(attempt)

    def allocated(
        self,
        request_id: str,
        attempt: str,
        deadline: float,
        *,
        queued_at: float = 0.0,
        max_queue_wait_s: float = math.inf,
    ) -> list[Instruction]:
        """The engine reserved blocks for a remote prefill that is being queued.

        max_queue_wait_s: if neither it nor another attempt was claimed for so long, it is taken
        back.
        """
        self._attempts[attempt] = Attempt(
            request_id, attempt, deadline, queued_at, max_queue_wait_s
        )
        return []

    def published(self, attempt: str, sequence: int, lane: Lane) -> list[Instruction]:
        entry = self._attempts.get(attempt)
        if entry is None:
            return [DeleteJob(sequence)]
        entry.sequence, entry.lane = sequence, lane
        return [DeleteJob(sequence)] if entry.state is AttemptState.EXPIRING else []

    def not_published(self, attempt: str) -> list[Instruction]:
        """The queue refused, or did not answer. A later claim shows that the queue has the job
        after all."""
        entry = self._attempts.get(attempt)
        if entry is None or entry.state is not AttemptState.QUEUED:
            return []
        return self._withdraw(entry, Outcome.REFUSED)

    def claim(self, attempt: str, claim: int, writer: int, now: float) -> str | None:
        """A writer claims the attempt, or renews its claim. Returns why it is refused; None if the
        claim holds for `claim_s` from now on."""
        entry = self._attempts.get(attempt)
        if entry is None:
            return "unknown or ended attempt"
        if entry.state is AttemptState.EXPIRING:
            return "withdrawn"
        if entry.done:
            return "written already"
        if now >= entry.deadline:
            return "past its deadline"
        if entry.state is AttemptState.QUEUED:
            self._first_claim(entry, claim, writer, now)
        elif entry.claim != claim:
            return "claimed by another writer"
        entry.held_until = entry.wanted_until = now + self.claim_s
        return None

    def received(self, attempt: str) -> list[Instruction]:
        """All ranks have reported the writers' commits: no write follows."""
        entry = self._attempts.get(attempt)
        if entry is None or entry.state is not AttemptState.HELD:
            return []
        del self._attempts[attempt]
        return [Release(attempt), *_job_of(entry)]

    def finished(self, attempt: str) -> list[Instruction]:
        """The request ended (cancelled) before its KV arrived."""
        entry = self._attempts.get(attempt)
        if entry is None or not _waits(entry):
            return []
        return self._withdraw(entry, Outcome.CANCELLED)

    def writer_done(
        self, attempt: str, claim: int, outcome: Outcome | None, detail: str = ""
    ) -> list[Instruction]:
        """The writer will not touch the blocks again.

        The attempt's claim may never have arrived: then the job is over. Ignored if it is about
        another claim than the attempt's. outcome: why it is not written; None: it is. detail: as
        the writer reported it.
        """
        entry = self._attempts.get(attempt)
        if entry is None:
            return []
        if entry.state is AttemptState.QUEUED:
            return self._withdraw(entry, outcome, detail) if outcome is not None else []
        if entry.claim != claim:
            return []
        if entry.state is not AttemptState.HELD:
            del self._attempts[attempt]
            return [Release(attempt)]
        entry.done = True
        return [] if outcome is None else self._withdraw(entry, outcome, detail)

    def writer_left(self, writer: int, now: float) -> list[Instruction]:
        """The writer's keys are gone: it is dead, or it leaves and renews its claims at once."""
        for entry in self._of(writer):
            entry.wanted_until = min(entry.wanted_until, now + LEAVING_S)
        return []

    def writer_silent(self, writer: int) -> list[Instruction]:
        """The writer is unresponsive or unhealthy."""
        out: list[Instruction] = []
        for entry in self._of(writer):
            out += self._withdraw(entry, Outcome.WRITER_SILENT)
        return out

    def withdraw_queued(self, outcome: Outcome) -> list[Instruction]:
        """Queued attempts will not be claimed: no writer, or this engine drains."""
        out: list[Instruction] = []
        for entry in [e for e in self._attempts.values() if e.state is AttemptState.QUEUED]:
            out += self._withdraw(entry, outcome)
        return out

    def tick(self, now: float) -> list[Instruction]:
        """Handles the times that have passed."""
        out: list[Instruction] = []
        for entry in [each for each in self._attempts.values() if now >= self._due(each)]:
            if not _waits(entry):
                del self._attempts[entry.id]
                out.append(Release(entry.id))
            elif now >= entry.deadline:
                out += self._withdraw(entry, Outcome.DEADLINE)
            elif entry.state is AttemptState.HELD or now >= entry.passed_at + PASSED_S:
                out += self._withdraw(entry, Outcome.WRITER_LOST)
            else:
                waited = f"no claim for {now - entry.queued_at:.2f} s"
                out += self._withdraw(entry, Outcome.TAKEN_BACK, waited)
        return out

    @property
    def next_due(self) -> float:
        """When `tick` has something to do next; infinite if nothing waits."""
        return min((self._due(each) for each in self._attempts.values()), default=math.inf)

    def _due(self, entry: Attempt) -> float:
        if not _waits(entry):
            return entry.held_until + self.landing_s
        if entry.state is AttemptState.HELD:
            return entry.deadline if entry.done else min(entry.deadline, entry.wanted_until)
        # While others are claimed, the queue moves.
        unclaimed = max(entry.queued_at, self._claimed_at) + entry.max_queue_wait_s
        return min(entry.deadline, unclaimed, entry.passed_at + PASSED_S)

    def _first_claim(self, entry: Attempt, claim: int, writer: int, now: float) -> None:
        entry.state, entry.claim, entry.writer = AttemptState.HELD, claim, writer
        self._claimed_at = now
        for other in self._attempts.values():
            if other.state is AttemptState.QUEUED and _is_before(other, entry):
                other.passed_at = min(other.passed_at, now)

    def _of(self, writer: int) -> list[Attempt]:
        """The attempts that wait for this writer."""
        held = [e for e in self._attempts.values() if e.state is AttemptState.HELD and not e.done]
        return [entry for entry in held if entry.writer == writer]

    def _withdraw(self, entry: Attempt, outcome: Outcome, detail: str = "") -> list[Instruction]:
        ended = Ended(entry.request_id, entry.id, outcome, detail)
        out: list[Instruction] = [ended, *_job_of(entry)]
        if entry.state is AttemptState.HELD and not entry.done:
            entry.state = AttemptState.EXPIRING
        else:
            del self._attempts[entry.id]
            out.append(Release(entry.id))
        return out


def _job_of(entry: Attempt) -> list[Instruction]:
    """Deletes the entry's job. Its writer acknowledges it, too, but may be lost before."""
    return [] if entry.sequence is None else [DeleteJob(entry.sequence)]


def _waits(entry: Attempt) -> bool:
    """Whether the request waits for it."""
    return entry.state in (AttemptState.QUEUED, AttemptState.HELD)


def _is_before(one: Attempt, other: Attempt) -> bool:
    """Whether the queue delivers the job of `one` before that of `other`."""
    if one.sequence is None or other.sequence is None or one.lane is not other.lane:
        return False
    # A stream that its cluster has lost and made again counts from its first sequence again.
    return one.sequence < other.sequence or one.queued_at < other.queued_at

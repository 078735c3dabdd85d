"""The decode side's book of remote prefills: a pure state machine.

One entry per attempt, from the allocation of its blocks to the moment nobody
can write into them any more, nor read those that its prefix lies in:

    QUEUED ──claim──► CLAIMED ──received──────────────────────► (gone)
      │                  │ └──withdraw, its writer being done──► (gone)
      │ withdraw         │ withdraw
      ▼                  ▼
    (gone)          QUARANTINED ──writer done, or certainly dead──► (gone)

Withdrawn is what the queue refused or lost, what no writer responds for, what is not
received when its deadline or request ends, and what its writer gave up, left, or holds
when it falls silent. Silence is no proof of death: blocks stay quarantined, as ever.

A claimed or quarantined attempt's writer may leave, which is no state but two
deadlines:

    keys vanish ──► leaving second ──► lost: withdrawn ──writer_grace_s──► dead: released
        │             ▲    │
        │             │    └─promise to stay `for_s`: lost and dead count from its end
        │             └────── (each promise replaces the one before)
        └─keys are back, same lease: nothing happened

The second is for a revoked worker, which can say that it still finishes what it has
begun. A writer whose engine died says so, and counts as lost at once. Leases that are
gone claim nothing. Cancels of quarantined attempts are repeated: words get lost.

Method calls are named after what happened; what must be done comes out as
instructions. The caller owns I/O, clock and locking. Two rules carry all safety: a
claim is granted only while the attempt is wanted, and a withdrawn attempt that
somebody may still be writing keeps its blocks until that writer is done or dead.
"""

import enum
import math
from dataclasses import dataclass, field

from dynamo_lite.policy.instructions import (
    CancelWriter,
    DeleteJob,
    Ended,
    GiveUp,
    Hold,
    Instruction,
    Outcome,
    Release,
)

#: Leases that are remembered as gone; a claim of theirs can only be seconds late.
_MAX_GONE = 1024


class AttemptState(enum.Enum):
    QUEUED = "queued"
    CLAIMED = "claimed"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class Refusal:
    """Why a claim or a promise was refused. elsewhere: another writer, or a later try, may
    get the claim."""

    reason: str
    elsewhere: bool = False


@dataclass
class _Entry:
    request_id: str
    attempt: str
    block_ids: tuple[int, ...]
    deadline: float
    state: AttemptState = AttemptState.QUEUED
    sequence: int | None = None
    writer: int | None = None
    claim: int = 0
    writer_done: bool = False
    cancel_at: float | None = None
    stays_until: float = -math.inf
    lost_at: float | None = None
    release_at: float | None = None


@dataclass
class Ledger:
    """writer_grace_s: how long after a writer's lease is gone a write of its may land,
    and how long a cancelled writer may be silent before it is told again.

    leaving_s: how long a writer whose keys vanished has to say that it stays.
    """

    writer_grace_s: float
    leaving_s: float = 1.0
    _attempts: dict[str, _Entry] = field(default_factory=dict[str, _Entry])
    _by_request: dict[str, _Entry] = field(default_factory=dict[str, _Entry])
    _gone: dict[int, None] = field(default_factory=dict[int, None])

    def __repr__(self) -> str:
        rows = ", ".join(f"{e.attempt}:{e.state.value}" for e in self._attempts.values())
        return f"<Ledger {rows or 'empty'}>"

    @property
    def waiting(self) -> int:
        """Requests that wait for remote KV."""
        return len(self._by_request)

    @property
    def quarantined(self) -> int:
        """Attempts whose blocks are held back."""
        return len(self._attempts) - len(self._by_request)

    def state(self, attempt: str) -> AttemptState | None:
        entry = self._attempts.get(attempt)
        return entry.state if entry else None

    def writer(self, attempt: str) -> int | None:
        """The lease id of whoever was granted its claim."""
        entry = self._attempts.get(attempt)
        return entry.writer if entry else None

    def request(self, attempt: str) -> str | None:
        entry = self._attempts.get(attempt)
        return entry.request_id if entry else None

    def allocated(
        self, request_id: str, attempt: str, block_ids: tuple[int, ...], deadline: float
    ) -> None:
        """The engine reserved `block_ids` for a remote prefill that is being queued.

        All that its writer may touch: those to be written, and the prefix before them,
        which it may read.
        """
        entry = _Entry(request_id, attempt, block_ids, deadline)
        self._attempts[attempt] = entry
        self._by_request[request_id] = entry

    def published(self, attempt: str, sequence: int) -> list[Instruction]:
        entry = self._attempts.get(attempt)
        if entry is None:
            return [DeleteJob(sequence)]
        entry.sequence = sequence
        return [DeleteJob(sequence)] if entry.state is AttemptState.QUARANTINED else []

    def not_published(self, attempt: str) -> list[Instruction]:
        """The queue refused, or did not answer. A claim shows that it has it after all."""
        entry = self._attempts.get(attempt)
        if entry is None or entry.state is not AttemptState.QUEUED:
            return []
        return self._withdraw(entry, Outcome.REFUSED)

    def claim(
        self, attempt: str, writer_lease_id: int, now: float, number: int = 0
    ) -> Refusal | None:
        """A writer asks for the attempt. Returns None when granted, else why not.

        It may ask again: the answer may have been lost. number: see `Claim`.
        """
        entry = self._attempts.get(attempt)
        if entry is None:
            return Refusal("unknown or ended attempt")
        if entry.state is AttemptState.QUARANTINED:
            return Refusal("withdrawn")
        if now >= entry.deadline:
            return Refusal("past its deadline")
        if writer_lease_id in self._gone:
            return Refusal("the writer's lease is gone", elsewhere=True)
        if entry.writer_done:
            return Refusal("written already")
        if entry.state is AttemptState.CLAIMED and entry.writer != writer_lease_id:
            return Refusal(f"claimed by {entry.writer:x}", elsewhere=True)
        if number < entry.claim:
            return Refusal("claimed again since")
        entry.state, entry.writer, entry.claim = AttemptState.CLAIMED, writer_lease_id, number
        return None

    def received(self, request_id: str, *, intact: bool = True) -> list[Instruction]:
        """All writers of the request's current attempt have finished.

        intact: whether the blocks hold what they have sent. Nobody writes any more
        in either case.
        """
        entry = self._by_request.pop(request_id, None)
        if entry is None:
            return []
        del self._attempts[entry.attempt]
        outcome = Outcome.COMMITTED if intact else Outcome.CORRUPT
        return [Ended(request_id, entry.attempt, outcome)]

    def request_finished(self, request_id: str) -> list[Instruction]:
        """The request ended (cancelled) before its KV came."""
        entry = self._by_request.get(request_id)
        return self._withdraw(entry, Outcome.CANCELLED) if entry else []

    def writer_done(
        self,
        attempt: str,
        writer_lease_id: int,
        *,
        written: bool,
        number: int = 0,
        outcome: Outcome = Outcome.WRITER_FAILED,
        detail: str = "",
    ) -> list[Instruction]:
        """The writer says that by its claims up to `number` it will not touch the blocks again.

        It may say so of an attempt whose claim never arrived: the job is over. Of
        one that another writer holds, or itself by a later claim, it says nothing.
        outcome: of the remote prefill where it is not written; detail: why not, in the
        writer's words.
        """
        entry = self._attempts.get(attempt)
        if entry is None or (entry.writer is None and written):
            return []
        if entry.writer is not None and (entry.writer != writer_lease_id or number < entry.claim):
            return []
        if entry.state is AttemptState.QUARANTINED:
            del self._attempts[attempt]
            return [Release(attempt)]
        entry.writer_done = True
        return [] if written else self._withdraw(entry, outcome, detail)

    def writer_died(self, attempt: str, writer_lease_id: int, now: float) -> list[Instruction]:
        """The writer's engine is dead: it starts no write, but what it started may still land."""
        entry = self._attempts.get(attempt)
        if entry is not None and entry.writer is None:
            return self.writer_done(attempt, writer_lease_id, written=False)
        if entry is not None and entry.writer == writer_lease_id and not entry.writer_done:
            entry.lost_at = now
            entry.release_at = now + self.writer_grace_s
        return []

    def writer_gone(self, writer_lease_id: int, now: float) -> None:
        """The writer's keys are gone: it was revoked, or it is dead. `tick` settles it."""
        self._gone[writer_lease_id] = None
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]
        for entry in [e for e in self._attempts.values() if e.writer == writer_lease_id]:
            if entry.writer_done:
                continue  # all of it was delivered; the engine is about to notice
            entry.lost_at = max(now + self.leaving_s, entry.stays_until)
            entry.release_at = entry.lost_at + self.writer_grace_s

    def writer_back(self, writer_lease_id: int) -> None:
        """The writer's keys are there again, under the same lease: it never left."""
        self._gone.pop(writer_lease_id, None)
        for entry in self._attempts.values():
            if entry.writer == writer_lease_id:
                entry.lost_at = entry.release_at = None

    def writer_silent(self, writer_lease_id: int) -> list[Instruction]:
        """The writer sends no beats, or says that it cannot work: nobody waits for it.

        It may come back and write: its lease lives. It may also claim again.
        """
        out: list[Instruction] = []
        for entry in list(self._by_request.values()):
            if entry.writer == writer_lease_id and not entry.writer_done:
                out += self._withdraw(entry, Outcome.WRITER_SILENT)
        return out

    def writer_stays(
        self, attempt: str, writer_lease_id: int, for_s: float, now: float, number: int = 0
    ) -> Refusal | None:
        """A leaving writer promises to finish the attempt, or to start no write after `for_s`.

        What it started just before may land later, as after the end of a lease. Returns None
        when the blocks are held for this claim of this writer, else why they are not. A
        promise that comes before the writer's keys vanish counts when they do.
        """
        entry = self._attempts.get(attempt)
        if entry is None:
            return Refusal("unknown or ended attempt")
        if entry.writer is None:
            return Refusal("not claimed")
        if entry.writer != writer_lease_id:
            return Refusal(f"claimed by {entry.writer:x}")
        if entry.claim != number:
            return Refusal(f"held by claim {entry.claim}, not {number}")
        entry.stays_until = now + for_s
        if entry.lost_at is not None:
            entry.lost_at = entry.stays_until
            entry.release_at = entry.lost_at + self.writer_grace_s
        return None

    def withdraw_queued(self, outcome: Outcome) -> list[Instruction]:
        """Nobody will claim what is still queued: no writer, no queue, or we leave."""
        out: list[Instruction] = []
        for entry in [e for e in self._by_request.values() if e.state is AttemptState.QUEUED]:
            out += self._withdraw(entry, outcome)
        return out

    def tick(self, now: float) -> list[Instruction]:
        """Deadlines that have passed, and cancels that were not answered."""
        out: list[Instruction] = []
        for entry in list(self._by_request.values()):
            if now >= entry.deadline:
                out += self._withdraw(entry, Outcome.DEADLINE)
            elif entry.lost_at is not None and now >= entry.lost_at and not entry.writer_done:
                out += self._withdraw(entry, Outcome.WRITER_LOST)
        for entry in [e for e in self._attempts.values() if e.state is AttemptState.QUARANTINED]:
            if entry.release_at is not None and now >= entry.release_at:
                del self._attempts[entry.attempt]
                out.append(Release(entry.attempt))
            else:
                out += self._remind(entry, now)
        return out

    def _remind(self, entry: _Entry, now: float) -> list[Instruction]:
        """The cancel of a quarantined attempt again, when its writer is silent for long."""
        assert entry.writer is not None
        if entry.cancel_at is None:
            entry.cancel_at = now + self.writer_grace_s
        if now < entry.cancel_at:
            return []
        entry.cancel_at = now + self.writer_grace_s
        return [CancelWriter(entry.writer, entry.attempt)]

    def _withdraw(self, entry: _Entry, outcome: Outcome, detail: str = "") -> list[Instruction]:
        del self._by_request[entry.request_id]
        out: list[Instruction] = []
        if entry.state is AttemptState.CLAIMED and not entry.writer_done:
            assert entry.writer is not None
            entry.state = AttemptState.QUARANTINED
            out.append(Hold(entry.attempt, entry.block_ids))
            out.append(CancelWriter(entry.writer, entry.attempt))
        else:
            del self._attempts[entry.attempt]
        if entry.sequence is not None:
            out.append(DeleteJob(entry.sequence))
        out.append(GiveUp(entry.request_id, entry.attempt))
        out.append(Ended(entry.request_id, entry.attempt, outcome, detail))
        return out

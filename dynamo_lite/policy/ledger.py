"""The decode side's book of remote prefills: a pure state machine.

One entry per attempt, from the allocation of its blocks to the moment nobody
can write into them any more:

    QUEUED ──claim──► CLAIMED ──received──► (gone)
      │                  │
      │ withdraw         │ withdraw
      ▼                  ▼
    (gone)          QUARANTINED ──writer done, or dead for one lease TTL──► (gone)

Events come in as method calls named after what happened; what must be done
comes out as instructions. The caller owns I/O, clock and locking. Two rules
carry all safety: a claim is granted only while the attempt is wanted, and a
withdrawn attempt that somebody may still be writing keeps its blocks until
that writer is done or certainly dead.
"""

import enum
from dataclasses import dataclass, field


class State(enum.Enum):
    QUEUED = "queued"
    CLAIMED = "claimed"
    QUARANTINED = "quarantined"


class Outcome(enum.Enum):
    """How a remote prefill ended for its request; the label of the counter."""

    COMMITTED = "committed"
    REFUSED = "refused"  # the queue did not take it
    DEADLINE = "deadline"
    WRITER_FAILED = "writer_failed"
    WRITER_LOST = "writer_lost"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class DeleteJob:
    """Take the job off the queue: nobody wants it."""

    sequence: int


@dataclass(frozen=True)
class CancelWriter:
    """Tell the writer to stop and to say when it has."""

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
    """For the books: the request's remote prefill is over, one way or another."""

    request_id: str
    attempt: str
    outcome: Outcome


Instruction = DeleteJob | CancelWriter | Hold | Release | GiveUp | Ended


@dataclass
class _Entry:
    request_id: str
    attempt: str
    block_ids: tuple[int, ...]
    deadline: float
    state: State = State.QUEUED
    sequence: int | None = None
    writer: int | None = None
    writer_done: bool = False
    release_at: float | None = None


@dataclass
class Ledger:
    """writer_grace_s: how long after a writer's lease is gone a write of its may land."""

    writer_grace_s: float
    _attempts: dict[str, _Entry] = field(default_factory=dict)
    _by_request: dict[str, _Entry] = field(default_factory=dict)

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

    def state(self, attempt: str) -> State | None:
        entry = self._attempts.get(attempt)
        return entry.state if entry else None

    def allocated(
        self, request_id: str, attempt: str, block_ids: tuple[int, ...], deadline: float
    ) -> None:
        """The engine reserved `block_ids` for a remote prefill that is being queued."""
        entry = _Entry(request_id, attempt, block_ids, deadline)
        self._attempts[attempt] = entry
        self._by_request[request_id] = entry

    def published(self, attempt: str, sequence: int) -> list[Instruction]:
        entry = self._attempts.get(attempt)
        if entry is None:
            return [DeleteJob(sequence)]
        entry.sequence = sequence
        return []

    def not_published(self, attempt: str) -> list[Instruction]:
        """The queue refused, or did not answer. A claim shows that it has it after all."""
        entry = self._attempts.get(attempt)
        if entry is None or entry.state is not State.QUEUED:
            return []
        return self._withdraw(entry, Outcome.REFUSED)

    def claim(self, attempt: str, writer_lease_id: int, now: float) -> str | None:
        """A writer asks for the attempt. Returns None when granted, else why not."""
        entry = self._attempts.get(attempt)
        if entry is None:
            return "unknown or ended attempt"
        if entry.state is State.QUARANTINED:
            return "withdrawn"
        if now >= entry.deadline:
            return "past its deadline"
        if entry.state is State.CLAIMED and entry.writer != writer_lease_id:
            return f"claimed by {entry.writer:x}"
        entry.state, entry.writer = State.CLAIMED, writer_lease_id
        return None

    def received(self, request_id: str) -> list[Instruction]:
        """The engine has all the KV of the request's current attempt."""
        entry = self._by_request.pop(request_id, None)
        if entry is None:
            return []
        del self._attempts[entry.attempt]
        return [Ended(request_id, entry.attempt, Outcome.COMMITTED)]

    def request_finished(self, request_id: str) -> list[Instruction]:
        """The request ended (cancelled) before its KV came."""
        entry = self._by_request.get(request_id)
        return self._withdraw(entry, Outcome.CANCELLED) if entry else []

    def writer_done(self, attempt: str, *, written: bool) -> list[Instruction]:
        """The writer says that it will not touch the blocks again."""
        entry = self._attempts.get(attempt)
        if entry is None or entry.writer is None:
            return []
        if entry.state is State.QUARANTINED:
            del self._attempts[attempt]
            return [Release(attempt)]
        entry.writer_done = True
        return [] if written else self._withdraw(entry, Outcome.WRITER_FAILED)

    def writer_gone(self, writer_lease_id: int, now: float) -> list[Instruction]:
        """The writer's lease is gone. What it sent before may still be landing."""
        out: list[Instruction] = []
        for entry in [e for e in self._attempts.values() if e.writer == writer_lease_id]:
            if entry.state is State.CLAIMED:
                out += self._withdraw(entry, Outcome.WRITER_LOST)
            entry.release_at = now + self.writer_grace_s
        return out

    def tick(self, now: float) -> list[Instruction]:
        """Deadlines that have passed."""
        out: list[Instruction] = []
        for entry in list(self._by_request.values()):
            if now >= entry.deadline:
                out += self._withdraw(entry, Outcome.DEADLINE)
        for entry in list(self._attempts.values()):
            if entry.release_at is not None and now >= entry.release_at:
                del self._attempts[entry.attempt]
                out.append(Release(entry.attempt))
        return out

    def next_deadline(self) -> float | None:
        """When `tick` next has something to do."""
        times = [e.deadline for e in self._by_request.values()]
        times += [e.release_at for e in self._attempts.values() if e.release_at is not None]
        return min(times, default=None)

    def _withdraw(self, entry: _Entry, outcome: Outcome) -> list[Instruction]:
        del self._by_request[entry.request_id]
        out: list[Instruction] = []
        if entry.state is State.CLAIMED and not entry.writer_done:
            assert entry.writer is not None
            entry.state = State.QUARANTINED
            out.append(Hold(entry.attempt, entry.block_ids))
            out.append(CancelWriter(entry.writer, entry.attempt))
        else:
            del self._attempts[entry.attempt]
        if entry.sequence is not None:
            out.append(DeleteJob(entry.sequence))
        out.append(GiveUp(entry.request_id, entry.attempt))
        out.append(Ended(entry.request_id, entry.attempt, outcome))
        return out

"""The decode side's record of remote prefills: a pure state machine.

There is one entry per attempt, from the allocation of its blocks until no process can write into
them, or read the blocks of its prefix, any more. Its states are drawn in `attempt.py`, and in
`writer_deadlines.py` what happens when its writer leaves.

An attempt is withdrawn if the queue refused or lost it, if no prefill worker is left, if it is not
received when its deadline or request ends, if its writer gave up, left, or is unresponsive while
it holds the claim, and before a claim if this engine drains or no writer claims it in time. An
unresponsive writer may be alive: the blocks stay quarantined. Claims of leases that are gone are
refused.

Methods are named after events, and return what must be done as instructions. The caller owns I/O,
clock and locking. Safety rests on two rules: a claim is granted only while the attempt is wanted,
and a withdrawn attempt with a writer that may still write keeps its blocks until that writer is
done or dead.
"""

import math
from dataclasses import dataclass, field

from dynamo_lite.disagg.attempts.attempt import Attempt, AttemptState, Refusal, Terms
from dynamo_lite.disagg.attempts.instructions import (
    CancelWriter,
    DeleteJob,
    Ended,
    GiveUp,
    Hold,
    Instruction,
    Outcome,
    Release,
)
from dynamo_lite.disagg.attempts.writer_deadlines import WriterDeadlines

#: Most leases that are remembered as gone; their claims can only be seconds late.
_MAX_GONE = 1024

_UNKNOWN = Refusal("unknown or ended attempt")


@dataclass
class Ledger:
    """All remote prefills of one decode engine."""

    #: The lease's time-to-live: how long a writer's fence may stay open after its keys vanished,
    #: how long a write may take to land after its start, and how long a cancelled writer may be
    #: silent before the cancel is repeated.
    writer_grace_s: float
    #: How long a writer whose keys vanished has to promise that it stays.
    leaving_s: float = 1.0
    _attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    _by_request: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    #: When a claim was last granted.
    _claimed_at: float = -math.inf
    _gone: dict[int, None] = field(default_factory=dict[int, None])

    def __repr__(self) -> str:
        rows = ", ".join(f"{e.id}:{e.state.value}" for e in self._attempts.values())
        return f"<Ledger {rows or 'empty'}>"

    @property
    def waiting(self) -> int:
        """Requests that wait for remote KV."""
        return len(self._by_request)

    @property
    def quarantined(self) -> int:
        """Withdrawn attempts whose blocks are not reused yet."""
        return len(self._attempts) - len(self._by_request)

    @property
    def writers(self) -> frozenset[int]:
        """Leases of the writers of claimed and quarantined attempts."""
        # The list is made in one step, so another thread may enter attempts meanwhile.
        writers = [entry.writer for entry in list(self._attempts.values())]
        return frozenset(writer for writer in writers if writer is not None)

    def state(self, attempt: str) -> AttemptState | None:
        entry = self._attempts.get(attempt)
        return entry.state if entry else None

    def writer(self, attempt: str) -> int | None:
        """The lease id of the writer that holds the claim."""
        entry = self._attempts.get(attempt)
        return entry.writer if entry else None

    def request(self, attempt: str) -> str | None:
        entry = self._attempts.get(attempt)
        return entry.request_id if entry else None

    def allocated(
        self,
        request_id: str,
        attempt: str,
        block_ids: tuple[int, ...],
        deadline: float,
        *,
        queued_at: float = 0.0,
        max_queue_wait_s: float = math.inf,
    ) -> None:
        """The engine reserved `block_ids` for a remote prefill that is being queued.

        block_ids: all blocks that the writer may touch: those to be written, and the prefix before
        them, which it may read. max_queue_wait_s: if neither it nor another attempt was claimed
        for so long, it is taken back.
        """
        deadlines = WriterDeadlines(self.writer_grace_s, self.leaving_s)
        entry = Attempt(
            request_id, attempt, block_ids, deadline, deadlines, queued_at, max_queue_wait_s
        )
        self._attempts[attempt] = entry
        self._by_request[request_id] = entry

    def offered(self, attempt: str, blocks: bytes) -> None:
        """The attempt's job is about to be published. blocks: digest of those that it names."""
        if (entry := self._attempts.get(attempt)) is not None:
            entry.offered = blocks

    def granted(self, attempt: str, now: float) -> Terms:
        """What the writer of an attempt, which must be claimed, was granted."""
        return self._attempts[attempt].terms(now)

    def published(self, attempt: str, sequence: int) -> list[Instruction]:
        entry = self._attempts.get(attempt)
        if entry is None:
            return [DeleteJob(sequence)]
        entry.sequence = sequence
        return [DeleteJob(sequence)] if entry.state is AttemptState.QUARANTINED else []

    def not_published(self, attempt: str) -> list[Instruction]:
        """The queue refused, or did not answer. A later claim shows that the queue has the job
        after all."""
        entry = self._attempts.get(attempt)
        if entry is None or entry.state is not AttemptState.QUEUED:
            return []
        return self._withdraw(entry, Outcome.REFUSED)

    def claim(
        self, attempt: str, writer_lease_id: int, now: float, number: int = 0, grant: int = 0
    ) -> Refusal | None:
        """A writer claims the attempt. Returns None when granted, else why not.

        It may claim again, since the answer may have been lost. number: see `Claim`. grant: id of
        the grant, unless this claim was granted before; writes under earlier ones do not count.
        """
        entry = self._attempts.get(attempt)
        if entry is None:
            return _UNKNOWN
        gone = writer_lease_id in self._gone
        refusal = entry.claim(writer_lease_id, now, number, grant, gone=gone)
        if refusal is None:
            self._claimed_at = now
        return refusal

    def received(self, request_id: str, *, intact: bool = True) -> list[Instruction]:
        """All writers of the request's current attempt have finished.

        intact: whether their commits fit the blocks. In either case no write follows.
        """
        entry = self._by_request.pop(request_id, None)
        if entry is None:
            return []
        del self._attempts[entry.id]
        outcome = Outcome.COMMITTED if intact else Outcome.CORRUPT
        return [Ended(request_id, entry.id, outcome)]

    def request_finished(self, request_id: str) -> list[Instruction]:
        """The request ended (cancelled) before its KV arrived."""
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
        """The writer will not touch the blocks again under its claims up to `number`.

        The attempt's claim may never have arrived: then the job is over. Ignored if another writer
        holds the attempt, or this one by a later claim. outcome: of the remote prefill if it is not
        written. detail: why not, as the writer reported it.
        """
        entry = self._attempts.get(attempt)
        if entry is None or not entry.ended_by(writer_lease_id, number, written=written):
            return []
        if entry.state is AttemptState.QUARANTINED:
            del self._attempts[attempt]
            return [Release(attempt)]
        entry.writer_done = True
        return [] if written else self._withdraw(entry, outcome, detail)

    def writer_died(self, attempt: str, writer_lease_id: int, now: float) -> list[Instruction]:
        """The writer's engine is dead. Other processes of it may end later."""
        entry = self._attempts.get(attempt)
        if entry is not None and entry.writer is None:
            return self.writer_done(attempt, writer_lease_id, written=False)
        if entry is not None and entry.unfinished_by(writer_lease_id):
            entry.writer_deadlines.engine_died(now)
        return []

    def writer_gone(self, writer_lease_id: int, now: float) -> bool:
        """The writer's keys are gone: it was revoked, or it is dead. `tick` handles the rest.

        Returns whether it has attempts to finish.
        """
        self._gone[writer_lease_id] = None
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]
        unfinished = self._unfinished(writer_lease_id)
        for entry in unfinished:
            entry.writer_deadlines.keys_gone(now)
        return bool(unfinished)

    def writer_ended(self, writer_lease_id: int, now: float) -> None:
        """The writer's keys and its process are gone: it does not finish what it promised.

        Its engine's process may still write until the fence closes. A worker that NATS has lost
        looks the same.
        """
        for entry in self._unfinished(writer_lease_id):
            entry.writer_deadlines.ended(now)

    def _unfinished(self, writer_lease_id: int) -> list[Attempt]:
        """Without those whose writes were all delivered: the engine will notice these soon."""
        return [one for one in self._attempts.values() if one.unfinished_by(writer_lease_id)]

    def writer_back(self, writer_lease_id: int) -> None:
        """The writer's keys are back, under the same lease: it never left."""
        self._gone.pop(writer_lease_id, None)
        for entry in self._attempts.values():
            if entry.writer == writer_lease_id:
                entry.writer_deadlines.keys_back()

    def writer_silent(self, writer_lease_id: int) -> list[Instruction]:
        """The writer is unresponsive or unhealthy: its requests stop waiting.

        Its lease is alive, so it may still write, and claim again.
        """
        out: list[Instruction] = []
        for entry in list(self._by_request.values()):
            if entry.unfinished_by(writer_lease_id):
                out += self._withdraw(entry, Outcome.WRITER_SILENT)
        return out

    def writer_stays(
        self, attempt: str, writer_lease_id: int, for_s: float, now: float, number: int = 0
    ) -> Refusal | None:
        """A draining writer promises to finish the attempt, or to start no write after `for_s`.

        A write that it started just before may land later, as after the end of a lease. Returns
        None if the blocks are held for this claim of this writer, else why not. A promise that
        arrives before the writer's keys vanish counts from then on.
        """
        entry = self._attempts.get(attempt)
        if entry is None:
            return _UNKNOWN
        return entry.promised(writer_lease_id, for_s, now, number)

    def withdraw_queued(self, outcome: Outcome) -> list[Instruction]:
        """Queued attempts will not be claimed: no writer, no queue, or this engine drains."""
        out: list[Instruction] = []
        for entry in [e for e in self._by_request.values() if e.state is AttemptState.QUEUED]:
            out += self._withdraw(entry, outcome)
        return out

    def tick(self, now: float) -> list[Instruction]:
        """Handles deadlines that have passed, and cancels that were not answered."""
        out: list[Instruction] = []
        for entry in list(self._by_request.values()):
            if now >= entry.deadline:
                out += self._withdraw(entry, Outcome.DEADLINE)
            elif entry.unclaimed_for_too_long(now, self._claimed_at):
                # A claim that comes later is refused, so no writer touches its blocks.
                waited = f"no claim for {now - entry.queued_at:.2f} s"
                out += self._withdraw(entry, Outcome.TAKEN_BACK, waited)
            elif entry.writer_deadlines.lost(now) and not entry.writer_done:
                out += self._withdraw(entry, Outcome.WRITER_LOST)
        for entry in [e for e in self._attempts.values() if e.state is AttemptState.QUARANTINED]:
            if entry.writer_deadlines.dead(now):
                del self._attempts[entry.id]
                out.append(Release(entry.id))
            elif entry.writer_deadlines.cancels_again(now):
                assert entry.writer is not None
                out.append(CancelWriter(entry.writer, entry.id))
        return out

    def _withdraw(self, entry: Attempt, outcome: Outcome, detail: str = "") -> list[Instruction]:
        del self._by_request[entry.request_id]
        out: list[Instruction] = []
        if entry.withdraw():
            assert entry.writer is not None
            out.append(Hold(entry.id, entry.block_ids))
            out.append(CancelWriter(entry.writer, entry.id))
        else:
            del self._attempts[entry.id]
        if entry.sequence is not None:
            out.append(DeleteJob(entry.sequence))
        out.append(GiveUp(entry.request_id, entry.id))
        out.append(Ended(entry.request_id, entry.id, outcome, detail))
        return out

"""The attempts that a prefill rank writes, and their writes: waiting and in flight.

It writes the blocks of an attempt as they complete, into every rank of the decode engine
that needs a part of them; each write carries a notification. The last write into each rank
is the commit. Writes are not ordered, so it starts only when all earlier ones have ended.
Writes are started and polled only while the fence is open. They are started only after the
attempt's claim was granted, since the prompt is computed while the claim is on its way.
`staging.py` converts blocks for peers with other blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dynamo_lite.disagg.counters import BYTES, DESCRIPTORS, FENCED, Counters
from dynamo_lite.disagg.messages import NOT_GRANTED, BlockWrite
from dynamo_lite.disagg.prefill.outgoing import InFlightWrite, OutgoingAttempt, Ready, WriteTimes
from dynamo_lite.disagg.prefill.remote_ranks import RemoteRank, RemoteRanks
from dynamo_lite.disagg.prefill.staging import Staging, split
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.prefill import Committed, Landed
from dynamo_lite.runtime.permits import Permit, PermitVerdict
from dynamo_lite.transfer.base import Mover, Transfer

#: A write to a dead peer ends in an error within a few seconds.
_PREEMPTION_DRAIN_S = 30.0

#: How long a step may wait for its commit to be sent.
_COMMIT_POLL_S = 0.002


class BlockWrites:
    """memory: kind of the rank's memory. rank: its index. alive: whether the fence is open.
    verdict: whether the claim of an attempt was granted, by its permit. grant_of: then, the id of
    the grant. now: monotonic."""

    def __init__(
        self,
        mover: Mover,
        memory: str,
        rank: int,
        peers: RemoteRanks,
        staging: Staging,
        stats: Counters,
        *,
        alive: Callable[[], bool],
        verdict: Callable[[Permit], PermitVerdict],
        grant_of: Callable[[Permit], int],
        now: Callable[[], float],
    ):
        self._mover, self._memory, self._rank = mover, memory, rank
        self._peers, self._staging = peers, staging
        self._stats, self._times = stats, WriteTimes(stats, rank)
        self._alive, self._verdict, self._grant_of, self._now = alive, verdict, grant_of, now
        self._attempts: dict[str, OutgoingAttempt] = {}

    def __bool__(self) -> bool:
        """Whether any attempt is left."""
        return bool(self._attempts)

    @property
    def engines(self) -> set[str]:
        """The engines that are written to."""
        return {attempt.target for attempt in self._attempts.values()}

    @property
    def in_flight(self) -> set[str]:
        """The engines with writes in flight."""
        return {attempt.target for attempt in self._attempts.values() if attempt.in_flight}

    def add(self, write: BlockWrite, ready: Ready) -> None:
        """To be started by `pump` as soon as it may start."""
        attempt = self._attempts.setdefault(
            write.attempt, OutgoingAttempt(write.target_engine, write.permit)
        )
        if attempt.failure is None:
            attempt.failure = self._peers.ensure_connected(write.target_engine)
        layout = self._peers.layout(write.target_engine)
        parts = [write] if layout is None else split(write, layout)
        attempt.queue += [(part, ready) for part in parts]

    def pump(self) -> None:
        """Starts what can start, and sees what has ended."""
        for attempt in self._attempts.values():
            self._poll(attempt)
            while attempt.queue and self._start_next(attempt):
                pass
            self._poll(attempt)

    def stop(self, attempt_id: str) -> None:
        """Starts no write of the attempt any more."""
        if (attempt := self._attempts.get(attempt_id)) is not None:
            self._clear(attempt)

    def unfinished(self, attempt_id: str) -> bool:
        """Whether any of its writes is in flight or waits."""
        attempt = self._attempts.get(attempt_id)
        return attempt is not None and bool(attempt.in_flight or attempt.queue)

    def close(self, attempt_id: str) -> str | None:
        """Forgets an attempt whose writes have all ended. Returns why not all was written."""
        attempt = self._attempts.pop(attempt_id, None)
        return None if attempt is None else attempt.failure

    def drain(self, preempted: Sequence[str]) -> None:
        """Ends all writes from blocks of these attempts, which are about to be overwritten.

        Waits for writes in flight, except those from staging slots: a commit of overwritten
        data must not arrive. A write to a dead peer ends in an error by itself. Raises
        TransferError after 30 s.
        """
        deadline = self._now() + _PREEMPTION_DRAIN_S
        for attempt in [self._attempts[a] for a in preempted if a in self._attempts]:
            if any(write.last for write, _ in attempt.queue):
                # The scheduler half counts the job as complete, and will not repeat the write.
                attempt.failure = "preempted before its last write"
            self._clear(attempt)
            attempt.again = True
            while any(flight.slot is None for flight in attempt.in_flight):
                if self._now() > deadline:
                    # This ends the engine, which might else send another request's KV.
                    raise TransferError(
                        attempt.target,
                        f"a write of a preempted job does not end within {_PREEMPTION_DRAIN_S:g} s",
                    )
                self._poll(attempt)

    def _start_next(self, attempt: OutgoingAttempt) -> bool:
        """Starts the attempt's next write if it may start now; returns whether it was taken."""
        write, ready = attempt.queue[0]
        if attempt.failure is None and not self._is_granted(attempt):
            return False
        alone = write.last or attempt.again
        if attempt.failure is None and (not ready() or (alone and attempt.in_flight)):
            return False
        try:
            if attempt.failure is None and not self._staged(attempt, write):
                return False
            attempt.queue.popleft()
            attempt.again = False
            if attempt.failure is None:
                self._start(attempt, write)
        except (TransferError, ValueError, LookupError) as exc:
            self._fail(attempt, exc)
        self._release_slot(attempt)
        return True

    def _is_granted(self, attempt: OutgoingAttempt) -> bool:
        """Whether the attempt's claim was granted. If it was refused, nothing is written."""
        verdict = self._verdict(attempt.permit)
        if verdict is PermitVerdict.REFUSED:
            attempt.failure = NOT_GRANTED
            self._clear(attempt)
        if verdict is PermitVerdict.GRANTED and not attempt.grant:
            attempt.grant = self._grant_of(attempt.permit)
        return verdict is PermitVerdict.GRANTED

    def _staged(self, attempt: OutgoingAttempt, write: BlockWrite) -> bool:
        """Whether the write's bytes can be read. If they need staging, starts that first."""
        layout = self._peers.layout(write.target_engine)
        if layout is None:
            return True
        if attempt.slot is None:
            attempt.slot = self._staging.fill(layout, write)
        return attempt.slot is not None and attempt.slot.filled()

    def _start(self, attempt: OutgoingAttempt, write: BlockWrite) -> None:
        started = self._now()
        self._times.started(attempt, write, started)
        peers = self._peers.of(write.target_engine)
        for peer in peers:
            if not self._alive():
                attempt.failure = (
                    "this worker's lease is not certain to be alive: nothing is written"
                )
                self._stats.add(FENCED)
                break
            last = write.last and peer is peers[-1]
            transfer = self._write(attempt, write, peer)
            attempt.in_flight.append(InFlightWrite(transfer, started, last, attempt.slot, write))
            if attempt.slot is not None:
                attempt.slot.users += 1
        if write.last:
            self._poll_commit(attempt)

    def _clear(self, attempt: OutgoingAttempt) -> None:
        """Drops all writes that were not started."""
        attempt.queue.clear()
        self._release_slot(attempt)

    def _release_slot(self, attempt: OutgoingAttempt) -> None:
        self._staging.release(attempt.slot)
        attempt.slot = None

    def _poll_commit(self, attempt: OutgoingAttempt) -> None:
        """Polls a last write for a moment: its notification is only sent when a poll sees its end.

        The next poll may be a whole step away, while the decode engine's client waits.
        """
        until = self._now() + _COMMIT_POLL_S
        while attempt.in_flight and self._now() < until:
            self._poll(attempt)

    def _write(self, attempt: OutgoingAttempt, write: BlockWrite, peer: RemoteRank) -> Transfer:
        local_ids = write.local_ids if attempt.slot is None else range(len(write.remote_ids))
        local_side, remote_side = peer.blocks.descriptors(local_ids, write.remote_ids)
        if attempt.slot is not None:
            local_side[:, 0] += np.uint64(attempt.slot.address)
        self._stats.add(BYTES, int(local_side[:, 1].sum()))
        self._stats.add(DESCRIPTORS, len(local_side))
        memory = (self._memory, peer.memory)
        notice = self._notice(attempt, write, peer)
        return self._mover.write(peer.name, local_side, remote_side, memory=memory, notice=notice)

    def _notice(self, attempt: OutgoingAttempt, write: BlockWrite, peer: RemoteRank) -> bytes:
        """The notification that the write carries."""
        share: dict[str, Any] = {
            "attempt": write.attempt,
            "rank": self._rank,
            "writers": peer.writers,
            "parts": peer.parts,
            "grant": attempt.grant,
        }
        if write.last:
            share["cached_tokens"] = write.cached_tokens
            return encode(Committed(num_blocks=write.num_blocks, **share))
        return encode(Landed(first=write.first, num_blocks=len(write.remote_ids), **share))

    def _poll(self, attempt: OutgoingAttempt) -> None:
        if not self._alive():
            # In some transports polling moves data.
            return
        still: list[InFlightWrite] = []
        for flight in attempt.in_flight:
            try:
                if not flight.write.done():
                    still.append(flight)
                    continue
                self._times.ended(flight, self._now())
            except TransferError as exc:
                self._fail(attempt, exc)
            self._staging.release(flight.slot)
        attempt.in_flight = still

    def _fail(self, attempt: OutgoingAttempt, why: Exception) -> None:
        """Disconnects a failed peer: it may be dead. Once nothing is in flight, the next job
        connects it again."""
        attempt.failure = str(why)
        self._clear(attempt)
        if isinstance(why, TransferError):
            self._peers.failed(attempt.target, why)

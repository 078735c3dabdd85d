"""The shipped parts without one of their safeguards, which the simulation must detect: decode
workers, then prefill workers and clients of NATS, etcd and workers. They show that its invariants
can fail, and run nowhere else.
"""

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import msgspec

from dynamo_lite.disagg.attempts.attempt import Attempt, AttemptState, Refusal, Terms
from dynamo_lite.disagg.attempts.instructions import Hold, Instruction, Outcome
from dynamo_lite.disagg.attempts.ledger import Ledger
from dynamo_lite.disagg.decode.engine_events import EngineEvents
from dynamo_lite.disagg.decode.first_tokens import FirstTokens
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.prefill.job_runner import JobEnd
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.disagg.queue.base import Job
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.disagg.queue.puller import JetStreamJob
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.prefill import decode_job
from dynamo_lite.protocol.queue import Lane
from dynamo_lite.protocol.records import EndpointRecord, EngineMetadata, KvRegion
from dynamo_lite.request_plane.base import GenerateClient, MakeTransport, OnDeltas, OnLost
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.request_plane.migrating_request import MigratingRequest
from dynamo_lite.runtime.etcd.lease_thread import ThreadedLease
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.etcd.watch import EtcdWatch
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.permits import always_granted
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.store import Lease, Store
from dynamo_lite.serve.services.prefill_worker import PrefillWorker
from dynamo_lite.transfer.directory import MetadataDirectory
from tests.simulation.loop.process import PROCESS
from tests.simulation.planner_mutants import PLANNER_MUTANTS
from tests.simulation.shipped import Mutant, Shipped


class _NoClaim(Ledger):
    """A writer's claim is granted and not recorded."""

    def claim(
        self, attempt: str, writer_lease_id: int, now: float, number: int = 0, grant: int = 0
    ) -> Refusal | None:
        return None

    def granted(self, attempt: str, now: float) -> Terms:
        entry = self._attempts.get(attempt)
        return Terms(1, b"" if entry is None else entry.offered, 60.0)


class _NoQuarantine(Ledger):
    """Blocks of a withdrawn attempt are free at once, although its writer may still write."""

    def _withdraw(self, entry: Attempt, outcome: Outcome, detail: str = "") -> list[Instruction]:
        entry.writer_done = True
        return super()._withdraw(entry, outcome, detail)


class _NoPrefixHoldEvents(EngineEvents):
    def _carry_out_here(self, instructions: Iterable[Instruction]) -> None:
        super()._carry_out_here([self._less(one) for one in instructions])

    def _less(self, instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Hold):
            return instruction
        blocks = [self._pool.blocks[i] for i in instruction.block_ids]
        return Hold(instruction.attempt, tuple(b.block_id for b in blocks if b.key is None))


class _NoPrefixHold(DecodeScheduler):
    """The blocks of a withdrawn attempt that its writer may only read are free at once."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._events.__class__ = _NoPrefixHoldEvents


class _TakesBackClaimed(Ledger):
    """An engine also takes back what a writer has claimed, as if it were queued."""

    def tick(self, now: float) -> list[Instruction]:
        for entry in self._by_request.values():
            if now - entry.queued_at >= entry.max_queue_wait_s:
                entry.state = AttemptState.QUEUED
        return super().tick(now)


class _NoAttemptId(DecodeScheduler):
    """A remote prefill has the caller's request id, also when the request is retried."""

    def state_after_alloc(self, request: Prompt, block_ids: Sequence[int], external: int) -> None:
        self._prompts._jobs._new_attempt = lambda: request.request_id.partition("~")[0]
        super().state_after_alloc(request, block_ids, external)


class _NoDeadline(Ledger):
    """A decode engine waits for remote KV without a timeout."""

    def allocated(
        self,
        request_id: str,
        attempt: str,
        block_ids: tuple[int, ...],
        deadline: float,
        **limits: float,
    ) -> None:
        super().allocated(request_id, attempt, block_ids, math.inf, **limits)


class _FirstTokenTwice(FirstTokens):
    """The decode engine's first token is sent, also when the client has the prefill worker's."""

    def settle(self, own: str, delta: TokenDelta) -> TokenDelta:
        super().settle(own, delta)
        return delta


async def _ack_on_dequeue(job: Job) -> Job | None:
    """A job is acknowledged when it is pulled, not when it has ended."""
    await job.ack()
    return job


async def _by_wall_clock(job: Job) -> Job | None:
    """A worker drops jobs that are past their deadline by its own host's wall clock."""
    if decode_job(job.payload).deadline >= PROCESS.get().wall():
        return job
    await job.ack()
    return None


class _NoFence(PrefillRank):
    """A writer does not check whether its lease is alive."""

    def __init__(self, mover: Any, own: Any, rank: int, alive: Any, *more: Any, **named: Any):
        super().__init__(mover, own, rank, lambda: True, *more, **named)


class _NoPermit(PrefillRank):
    """A writer does not wait for the grant of its claim, but writes what it has computed."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs | {"verdict": always_granted})


class _ByAddress(MetadataDirectory):
    def __init__(self, store: Store, namespace: str):
        super().__init__(store, namespace)
        self._met: dict[bytes, tuple[KvRegion, ...]] = {}

    async def get(self, engine_id: str) -> EngineMetadata | None:
        found = await super().get(engine_id)
        if found is None:
            return None
        (rank,) = found.ranks
        address = rank.agent.partition(b"/")[0]
        rank = msgspec.structs.replace(rank, regions=self._met.setdefault(address, rank.regions))
        return msgspec.structs.replace(found, ranks=(rank,))


def _metadata_by_address(worker: PrefillWorker, host: Host) -> None:
    """The memory layout of a decode engine is kept by its address, not by its incarnation."""
    assert worker._jobs is not None
    worker._jobs._runner._directory = _ByAddress(host.store, host.spec.namespace)


def _silently_used_up(worker: PrefillWorker, host: Host) -> None:
    """A job that was delivered too often is dropped without a report to its engine."""
    assert worker._jobs is not None
    runner = worker._jobs._runner
    hand_back = runner._hand_back

    async def hand_back_others(request: Any, outcome: Any, why: str, counted: str) -> JobEnd:
        if counted == "used_up":
            return JobEnd("used_up", why)
        return await hand_back(request, outcome, why, counted)

    runner._hand_back = hand_back_others


def _hold_too_many(worker: PrefillWorker, host: Host) -> None:
    """A worker pulls more jobs than it may hold at a time."""
    assert worker._jobs is not None
    for index in range(2):
        host.spawn(worker._jobs.run(), f"more-prefill-jobs-{index}")


def _worker(violates: str, change: Callable[[PrefillWorker, Host], None]) -> Mutant:
    """change: called with each prefill worker that has started."""

    class Changed(PrefillWorker):
        async def start(self, host: Host) -> dict[str, Any]:
            facts = await super().start(host)
            change(self, host)
            return facts

    return Mutant(violates, Shipped(prefill_worker=Changed))


class _RedeliveryLost(JetStreamQueue):
    """After a reconnect the client of a worker's queue drops redelivered jobs."""

    _reconnected = False

    def _on_connection(self, connected: bool) -> None:
        super()._on_connection(connected)
        self._reconnected = self._reconnected or connected

    async def pull(
        self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)
    ) -> JetStreamJob | None:
        job = await super().pull(timeout_s=timeout_s, lanes=lanes)
        return None if job is not None and self._reconnected and job.deliveries > 1 else job


class _LateResume(EtcdStore):
    """A watch that resumes after an outage starts one revision too late."""

    @contextlib.asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[EtcdWatch]:
        async with super().watch(prefix) as watch:
            history_holds, request = watch._history_holds, watch._request
            resumes = False

            async def note_history_holds() -> bool:
                nonlocal resumes
                resumes = await history_holds()
                return resumes

            def late_request() -> Any:
                made = request()
                made.create_request.start_revision += resumes
                return made

            watch._history_holds, watch._request = note_history_holds, late_request
            yield watch


class _LeaseFromAnswer(EtcdStore):
    """A lease's deadline is computed from the answer to its refresh, not from the request."""

    @contextlib.asynccontextmanager
    async def lease(self, ttl_s: float) -> AsyncIterator[Lease]:
        async with super().lease(ttl_s) as lease:
            assert isinstance(lease, ThreadedLease)
            inner = lease._inner
            refresh = inner._refresh

            async def refresh_from_answer() -> bool:
                deadline = inner.deadline
                settled = await refresh()
                if inner.deadline > deadline:
                    inner._deadline = inner._boottime() + inner.ttl_s
                return settled

            inner._refresh = refresh_from_answer
            yield lease


def _waiting_for_broker(make: MakeTransport, messaging: Messaging) -> MakeTransport:
    """A request to a decode worker waits while NATS is away."""

    def make_waiting(on_deltas: OnDeltas, on_lost: OnLost) -> GenerateClient:
        client = make(on_deltas, on_lost)
        submit = client.submit

        async def submit_connected(member: EndpointRecord, request: GenerateRequest) -> None:
            await messaging.wait_connected(30.0)
            await submit(member, request)

        client.submit = submit_connected
        return client

    return make_waiting


class _StartsOver(FailoverClient):
    """A request that migrates starts again for its caller, too."""

    async def _migrate(self, flight: MigratingRequest, gone: str) -> None:
        flight._sent.clear()
        await super()._migrate(flight, gone)


_ASTRAY = "which is not the attempt's"
_UNCLAIMED = "still waits for a claim"

#: By the name that the command line takes.
MUTANTS: dict[str, Mutant] = {
    "no-claim": Mutant(_ASTRAY, Shipped(ledger=_NoClaim)),
    "no-quarantine": Mutant(_ASTRAY, Shipped(ledger=_NoQuarantine)),
    "no-prefix-hold": Mutant("which is not kept for", Shipped(decode_scheduler=_NoPrefixHold)),
    "takes-back-claimed": Mutant(_ASTRAY, Shipped(ledger=_TakesBackClaimed)),
    "no-attempt-id": Mutant("are taken", Shipped(decode_scheduler=_NoAttemptId)),
    "no-deadline": Mutant("still waits for remote KV", Shipped(ledger=_NoDeadline)),
    "first-token-twice": Mutant("tokens instead of", Shipped(first_tokens=_FirstTokenTwice)),
    "ack-on-dequeue": Mutant(_UNCLAIMED, Shipped(pulled=_ack_on_dequeue)),
    "no-fence": Mutant(_ASTRAY, Shipped(prefill_rank=_NoFence)),
    "no-permit": Mutant(_ASTRAY, Shipped(prefill_rank=_NoPermit)),
    "metadata-by-address": _worker(_ASTRAY, _metadata_by_address),
    "silently-used-up": _worker(_UNCLAIMED, _silently_used_up),
    "wall-clock-deadline": Mutant(_UNCLAIMED, Shipped(pulled=_by_wall_clock)),
    "holds-too-many-jobs": _worker("jobs at a time", _hold_too_many),
    "redelivery-lost": Mutant("jobs on the queue", Shipped(queue=_RedeliveryLost)),
    "late-resume": Mutant("the watch on", Shipped(store=_LateResume)),
    "lease-from-answer": Mutant("etcd has given up lease", Shipped(store=_LeaseFromAnswer)),
    "waits-for-broker": Mutant(
        "for a worker, and all were up", Shipped(transport=_waiting_for_broker)
    ),
    "moves-from-its-start": Mutant("is wrong", Shipped(failover_client=_StartsOver)),
    **PLANNER_MUTANTS,
}

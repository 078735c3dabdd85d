"""The shipped parts without one of their safeguards, which the simulation must detect.

They show that its invariants can fail, and run nowhere else.
"""

import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.decode.first_tokens import FirstTokens
from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.prefill.claims import HeldGrant
from dynamo_lite.disagg.prefill.job_runner import JobEnd
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.engine.base import PrefillEngine
from dynamo_lite.policy.attempt import Attempt, AttemptState, Refusal, Terms
from dynamo_lite.policy.grants import GrantWanted
from dynamo_lite.policy.instructions import Hold, Instruction, Outcome
from dynamo_lite.policy.ledger import Ledger
from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.grant import Grant
from dynamo_lite.protocol.prefill import decode_job, decode_notice
from dynamo_lite.protocol.records import EndpointRecord, EngineMetadata, KvRegion
from dynamo_lite.queue.base import Job, PrefillQueue
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.queue.job import JetStreamJob
from dynamo_lite.request_plane.base import GenerateClient, MakeTransport, OnDeltas, OnLost
from dynamo_lite.runtime.etcd.backend import EtcdBackend
from dynamo_lite.runtime.etcd.lease_thread import ThreadedLease
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.etcd.watch import EtcdWatch
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.permits import always_granted
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.store import Lease, Store
from dynamo_lite.services.backend import WorkerBackend
from dynamo_lite.services.prefill_worker import PrefillWorker
from dynamo_lite.simulation.engine.assembly import EngineSetup
from dynamo_lite.simulation.engine.mover import SimMover
from dynamo_lite.simulation.loop.process import PROCESS
from dynamo_lite.simulation.planner_mutants import PLANNER_MUTANTS
from dynamo_lite.simulation.servers.etcd_backend import ETCD_URL
from dynamo_lite.simulation.shipped import Shipped
from dynamo_lite.transfer.directory import MetadataDirectory


class AckOnDequeue(Shipped):
    """A job is acknowledged when it is pulled, not when it has ended."""

    @contextlib.asynccontextmanager
    async def queue(
        self, opened: AbstractAsyncContextManager[PrefillQueue]
    ) -> AsyncIterator[PrefillQueue]:
        async with opened as queue:
            pull = queue.pull

            async def hasty(**wanted: Any) -> Job | None:
                job = await pull(**wanted)
                if job is not None:
                    await job.ack()
                return job

            queue.pull = hasty
            yield queue


class NoClaim(Shipped):
    """A writer's claim is granted and not recorded."""

    def ledger(self, setup: EngineSetup) -> Ledger:
        return _NoClaim(setup.engine_config.lease_ttl_s)


class _NoClaim(Ledger):
    def claim(
        self, attempt: str, writer_lease_id: int, now: float, number: int = 0, grant: int = 0
    ) -> Refusal | None:
        return None

    def granted(self, attempt: str, now: float) -> Terms:
        entry = self._attempts.get(attempt)
        return Terms(1, b"" if entry is None else entry.offered, 60.0)


class NoQuarantine(Shipped):
    """Blocks of a withdrawn attempt are free at once, although its writer may still write."""

    def ledger(self, setup: EngineSetup) -> Ledger:
        return _NoQuarantine(setup.engine_config.lease_ttl_s)


class _NoQuarantine(Ledger):
    def _withdraw(self, entry: Attempt, outcome: Outcome, detail: str = "") -> list[Instruction]:
        entry.writer_done = True
        return super()._withdraw(entry, outcome, detail)


class _StealsClaimedLedger(Ledger):
    def steal(self, attempt: str, why: str) -> list[Instruction]:
        entry = self._attempts.get(attempt)
        if entry is not None and entry.state is AttemptState.CLAIMED:
            entry.state = AttemptState.QUEUED
        return super().steal(attempt, why)


class _StealsClaimed(DecodeScheduler):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        kept = self.prefills._by_attempt
        self.prefills.queued = lambda: [one for one in kept.values() if one.outcome is None]


class StealsClaimed(Shipped):
    """An engine also takes back what a writer has claimed, as if it were queued."""

    decode_scheduler = _StealsClaimed

    def ledger(self, setup: EngineSetup) -> Ledger:
        return _StealsClaimedLedger(setup.engine_config.lease_ttl_s)


class _NoPrefixHold(DecodeScheduler):
    def _apply(self, instructions: list[Instruction], *, fresh: bool = False) -> None:
        super()._apply([self._less(one) for one in instructions], fresh=fresh)

    def _less(self, instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Hold):
            return instruction
        assert self._pool is not None
        blocks = [self._pool.blocks[i] for i in instruction.block_ids]
        return Hold(instruction.attempt, tuple(b.block_id for b in blocks if b.key is None))


class NoPrefixHold(Shipped):
    """The blocks of a withdrawn attempt that its writer may only read are free at once."""

    decode_scheduler = _NoPrefixHold


class NoFence(Shipped):
    """A writer does not check whether its lease is alive."""

    def prefill_rank(
        self, setup: EngineSetup, mover: SimMover, metadata: EngineMetadata
    ) -> PrefillRank:
        return super().prefill_rank(replace(setup, alive=lambda: True), mover, metadata)


class NoPermit(Shipped):
    """A writer does not wait for the grant of its claim, but writes what it has computed."""

    def prefill_rank(
        self, setup: EngineSetup, mover: SimMover, metadata: EngineMetadata
    ) -> PrefillRank:
        return super().prefill_rank(replace(setup, verdict=always_granted), mover, metadata)


class NoGrantCheck(Shipped):
    """A writer takes each grant for its own."""

    def prefill_worker(
        self, config: dict[str, Any], spec: ProcessSpec, parts: WorkerBackend
    ) -> PrefillWorker:
        return _TrustingWorker(config, spec, parts)


class _TrustingWorker(PrefillWorker):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        assert self._jobs is not None

        def unchecked(grant: Grant | None, wanted: GrantWanted, elapsed_s: float) -> HeldGrant:
            assert grant is not None and wanted
            return HeldGrant(grant.id, grant.for_s - elapsed_s)

        self._jobs._claims._checked = unchecked
        return facts


class _TrustingRank(DecodeRank):
    def _add_notice(self, payload: bytes) -> None:
        notice = decode_notice(payload)
        awaited = self._awaited.get(notice.attempt)
        if awaited is not None and awaited.notices.grant is not None:
            notice = msgspec.structs.replace(notice, grant=awaited.notices.grant)
        super()._add_notice(encode_sealed(notice))


class UngrantedCommits(Shipped):
    """A decode engine accepts each commit, whatever grant it names."""

    decode_rank = _TrustingRank


class MetadataByAddress(Shipped):
    """The memory layout of a decode engine is kept by its address, not by its incarnation."""

    def prefill_worker(
        self, config: dict[str, Any], spec: ProcessSpec, parts: WorkerBackend
    ) -> PrefillWorker:
        return _ByAddressWorker(config, spec, parts)


class _ByAddressWorker(PrefillWorker):
    async def _open_directory(self, host: Host, engine: PrefillEngine) -> MetadataDirectory:
        await super()._open_directory(host, engine)
        return _ByAddress(host.store, host.spec.namespace)


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


class _NoAttemptId(DecodeScheduler):
    def _ask(
        self, prefill: RemotePrefill, request: Prompt, block_ids: Sequence[int], external: int
    ) -> None:
        self._jobs._new_attempt = lambda: request.request_id.partition("~")[0]
        super()._ask(prefill, request, block_ids, external)


class NoAttemptId(Shipped):
    """A remote prefill has the caller's request id, also when the request is retried."""

    decode_scheduler = _NoAttemptId


class NoDeadline(Shipped):
    """A decode engine waits for remote KV without a timeout."""

    def ledger(self, setup: EngineSetup) -> Ledger:
        return _NoDeadline(setup.engine_config.lease_ttl_s)


class _NoDeadline(Ledger):
    def allocated(
        self, request_id: str, attempt: str, block_ids: tuple[int, ...], deadline: float
    ) -> None:
        super().allocated(request_id, attempt, block_ids, math.inf)


class SilentlyUsedUp(Shipped):
    """A job that was delivered too often is dropped without a report to its engine."""

    def prefill_worker(
        self, config: dict[str, Any], spec: ProcessSpec, parts: WorkerBackend
    ) -> PrefillWorker:
        return _SilentWorker(config, spec, parts)


class _SilentWorker(PrefillWorker):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        assert self._jobs is not None
        runner = self._jobs._runner
        hand_back = runner._hand_back

        async def hand_back_others(request: Any, outcome: Any, why: str, counted: str) -> JobEnd:
            if counted == "used_up":
                return JobEnd("used_up", why)
            return await hand_back(request, outcome, why, counted)

        runner._hand_back = hand_back_others
        return facts


class WallClockDeadline(Shipped):
    """A worker drops jobs that are past their deadline by its own host's wall clock."""

    @contextlib.asynccontextmanager
    async def queue(
        self, opened: AbstractAsyncContextManager[PrefillQueue]
    ) -> AsyncIterator[PrefillQueue]:
        async with opened as queue:
            pull = queue.pull

            async def pull_fresh(**wanted: Any) -> Job | None:
                job = await pull(**wanted)
                if job is not None and decode_job(job.payload).deadline < PROCESS.get().wall():
                    await job.ack()
                    return None
                return job

            queue.pull = pull_fresh
            yield queue


class _RedeliveryLost(JetStreamQueue):
    _reconnected = False

    def _on_missing(self) -> None:
        super()._on_missing()
        self._reconnected = True

    async def pull(
        self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)
    ) -> JetStreamJob | None:
        job = await super().pull(timeout_s=timeout_s, lanes=lanes)
        return None if job is not None and self._reconnected and job.deliveries > 1 else job


class RedeliveryLost(Shipped):
    """After a reconnect the client of a worker's queue drops redelivered jobs."""

    queue_client = _RedeliveryLost


class LateResume(Shipped):
    """A watch that resumes after an outage starts one revision too late."""

    def store(self, backend: EtcdBackend) -> EtcdStore:
        return _LateResumeStore(ETCD_URL, backend=backend)


class _LateResumeStore(EtcdStore):
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


class LeaseFromAnswer(Shipped):
    """A lease's deadline is computed from the answer to its refresh, not from the request."""

    def store(self, backend: EtcdBackend) -> EtcdStore:
        return _LeaseFromAnswerStore(ETCD_URL, backend=backend)


class _LeaseFromAnswerStore(EtcdStore):
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


class WaitsForBroker(Shipped):
    """A request to a decode worker waits while NATS is away."""

    def transport(self, make: MakeTransport, messaging: Messaging) -> MakeTransport:
        def make_waiting(on_deltas: OnDeltas, on_lost: OnLost) -> GenerateClient:
            client = make(on_deltas, on_lost)
            submit = client.submit

            async def submit_connected(member: EndpointRecord, request: GenerateRequest) -> None:
                await messaging.wait_connected(30.0)
                await submit(member, request)

            client.submit = submit_connected
            return client

        return make_waiting


class FirstTokenTwice(Shipped):
    """The decode engine's first token is sent, also when the client has the prefill worker's."""

    def first_tokens(self, setup: EngineSetup) -> FirstTokens:
        return _SendsAll(CollectorRegistry(), setup.clock)


class _SendsAll(FirstTokens):
    def settle(self, own: str, delta: TokenDelta) -> TokenDelta:
        super().settle(own, delta)
        return delta


#: By the name that the command line takes. Those of planners are in `planner_mutants.py`.
MUTANTS: dict[str, type[Shipped]] = {
    "ack-on-dequeue": AckOnDequeue,
    "no-claim": NoClaim,
    "no-quarantine": NoQuarantine,
    "no-prefix-hold": NoPrefixHold,
    "steals-claimed": StealsClaimed,
    "no-fence": NoFence,
    "no-permit": NoPermit,
    "no-grant-check": NoGrantCheck,
    "ungranted-commits": UngrantedCommits,
    "metadata-by-address": MetadataByAddress,
    "no-attempt-id": NoAttemptId,
    "no-deadline": NoDeadline,
    "silently-used-up": SilentlyUsedUp,
    "wall-clock-deadline": WallClockDeadline,
    "redelivery-lost": RedeliveryLost,
    "late-resume": LateResume,
    "lease-from-answer": LeaseFromAnswer,
    "waits-for-broker": WaitsForBroker,
    "first-token-twice": FirstTokenTwice,
    **PLANNER_MUTANTS,
}

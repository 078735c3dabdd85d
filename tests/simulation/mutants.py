"""The shipped parts without one of their safeguards, which the simulation must detect: decode
workers, then prefill workers and clients of NATS, etcd and workers. They show that its invariants
can fail, and run nowhere else.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from dynamo_lite.disagg.attempts.ledger import (
    CLAIM_S,
    Attempt,
    AttemptState,
    Instruction,
    Ledger,
    Outcome,
)
from dynamo_lite.disagg.decision.lanes import Lane
from dynamo_lite.disagg.decode.first_tokens import FirstTokens
from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_api import BlockTables, Prompt
from dynamo_lite.disagg.prefill.peer_links import PeerLink
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.disagg.queue.base import Job
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.prefill import (
    Held,
    Written,
    decode_claim,
    decode_claim_reply,
    decode_done,
    decode_job,
)
from dynamo_lite.protocol.records import EndpointRecord, KvRegion
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.client import MakeTransport, RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.request_plane.migrating_request import MigratingRequest
from dynamo_lite.runtime.etcd.lease import EtcdLease
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.store import Lease, Snapshot, WatchEvent
from dynamo_lite.serve.services.prefill_worker import PrefillWorker
from tests.simulation.loop.process import PROCESS
from tests.simulation.planner_mutants import PLANNER_MUTANTS
from tests.simulation.shipped import Mutant, Shipped, after_start


class _NoClaim(Ledger):
    """A writer's claim is answered and not recorded."""

    def claim(self, attempt: str, claim: int, writer: int, now: float) -> str | None:
        return None


class _NoQuarantine(Ledger):
    """Blocks of a withdrawn attempt are free at once, although its writer may still write."""

    def _withdraw(self, entry: Attempt, outcome: Outcome, detail: str = "") -> list[Instruction]:
        entry.done = True
        return super()._withdraw(entry, outcome, detail)


class _NoLandingTime(Ledger):
    """Blocks of a withdrawn attempt are free at the end of its writer's claim."""

    def __init__(self, landing_s: float):
        super().__init__(landing_s=0.0)


class _NoPrefixHold(DecodeScheduler):
    """The blocks of an attempt that its writer may only read are not kept for it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        asked, pool = self.prefills.asked, self._pool

        def held_less(*about: Any, held: Sequence[Any], **more: Any) -> float:
            pool.free_blocks([block for block in held if block.key is not None])
            return asked(*about, held=[block for block in held if block.key is None], **more)

        self.prefills.asked = held_less


class _TakesBackClaimed(Ledger):
    """An engine also takes back what a writer has claimed, as if it were queued."""

    def tick(self, now: float) -> list[Instruction]:
        for entry in self._attempts.values():
            if entry.state is AttemptState.HELD and now >= entry.queued_at + entry.max_queue_wait_s:
                entry.state = AttemptState.QUEUED
        return super().tick(now)


class _ForeignCommits(DecodeRank):
    """A decode engine accepts each commit, whatever claim it names."""

    def _take(self, notice: Written) -> None:
        awaited = self._awaited.get(notice.attempt)
        if awaited is not None and awaited.claim:
            notice = msgspec.structs.replace(notice, claim=awaited.claim)
        super()._take(notice)


class _NoAttemptId(DecodeScheduler):
    """A remote prefill has the caller's request id, also when the request is retried."""

    def state_after_alloc(self, request: Prompt, tables: BlockTables, external: int) -> None:
        self._new_attempt = lambda: request.request_id.partition("~")[0]
        super().state_after_alloc(request, tables, external)


class _NoDeadline(Ledger):
    """A decode engine waits for remote KV without a timeout."""

    def allocated(
        self, request_id: str, attempt: str, deadline: float, **limits: float
    ) -> list[Instruction]:
        return super().allocated(request_id, attempt, math.inf, **limits)


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


class _NoCell(PrefillRank):
    """A writer does not look until when its claims hold."""

    def __init__(self, mover: Any, own: Any, rank: int, until: Any, *more: Any, **named: Any):
        super().__init__(mover, own, rank, lambda cell: math.inf, *more, **named)


def _use(worker: PrefillWorker, **changes: Any) -> None:
    """Its jobs get other parts."""
    worker._jobs._parts = dataclasses.replace(worker._jobs._parts, **changes)


class _OtherMessaging:
    """The messaging of a worker's jobs. Everything else is that of `inner`."""

    def __init__(self, inner: Messaging):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _HeldForEver(_OtherMessaging):
    def __init__(self, inner: Messaging):
        super().__init__(inner)
        self._held: set[str] = set()

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        reply = await self._inner.request(subject, payload, timeout_s=timeout_s)
        attempt = decode_claim(payload).attempt
        if isinstance(decode_claim_reply(reply), Held):
            self._held.add(attempt)
        return encode(Held(for_s=CLAIM_S)) if attempt in self._held else reply


def _refusal_ignored(worker: PrefillWorker, host: Host) -> None:
    """A writer whose renewal was refused goes on."""
    _use(worker, messaging=_HeldForEver(host.messaging))


class _SilentlyDropped(_OtherMessaging):
    async def publish(self, subject: str, payload: bytes) -> None:
        if not subject.endswith(".done") or decode_done(payload).claim:
            await self._inner.publish(subject, payload)


def _silently_dropped(worker: PrefillWorker, host: Host) -> None:
    """A job that is not claimed is dropped without a report to its engine."""
    _use(worker, messaging=_SilentlyDropped(host.messaging))


def _metadata_by_address(worker: PrefillWorker, host: Host) -> None:
    """The memory layout of a decode engine is kept by its address, not by its incarnation."""
    met: dict[bytes, tuple[KvRegion, ...]] = {}

    async def first_at_address(engine_id: str) -> PeerLink | None:
        links = worker._links
        link = links.known.get(engine_id) or await links.look_up(engine_id)
        if link is not None:
            (rank,) = link.target.ranks
            regions = met.setdefault(rank.agent.partition(b"/")[0], rank.regions)
            rank = msgspec.structs.replace(rank, regions=regions)
            link.target = msgspec.structs.replace(link.target, ranks=(rank,))
        return link

    _use(worker, links=SimpleNamespace(known={}, look_up=first_at_address))


def _hold_too_many(worker: PrefillWorker, host: Host) -> None:
    """A worker pulls more jobs than it may hold at a time."""
    for index in range(2):
        host.spawn(worker._jobs.run(), f"more-prefill-jobs-{index}")


def _worker(violates: str, change: Callable[[PrefillWorker, Host], None]) -> Mutant:
    return Mutant(violates, Shipped(prefill_worker=after_start(PrefillWorker, change)))


class _DeliversTwice(JetStreamQueue):
    """The queue delivers some jobs again."""

    _last: Job | None = None

    async def pull(self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> Job | None:
        job, self._last = self._last, None
        if job is None:
            job = await super().pull(timeout_s=timeout_s, lanes=lanes)
            self._last = job if job is not None and job.sequence % 4 == 0 else None
        return job


class _LateResume(EtcdStore):
    """A watch that resumes after an outage does not list what it has missed."""

    @contextlib.asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        async with super().watch(prefix) as events:
            yield _listed_once(events)


async def _listed_once(events: AsyncIterator[WatchEvent]) -> AsyncIterator[WatchEvent]:
    yield await anext(events)
    async for event in events:
        if not isinstance(event, Snapshot):
            yield event


class _LeaseFromAnswer(EtcdStore):
    """A lease's deadline is computed from the answer to its refresh, not from the request."""

    @contextlib.asynccontextmanager
    async def lease(self, ttl_s: float) -> AsyncIterator[Lease]:
        async with super().lease(ttl_s) as lease:
            assert isinstance(lease, EtcdLease)
            own, refresh = lease, lease._refresh

            async def refresh_from_answer() -> bool:
                deadline = own.deadline
                settled = await refresh()
                if own.deadline > deadline:
                    own.deadline = own._boottime() + own.ttl_s
                return settled

            lease._refresh = refresh_from_answer
            yield lease


def _waiting_for_broker(make: MakeTransport, messaging: Messaging) -> MakeTransport:
    """A request to a decode worker waits while NATS is away."""

    def make_waiting(on_deltas: OnDeltas, on_lost: OnLost) -> RemoteGenerateClient:
        client = make(on_deltas, on_lost)
        submit = client.submit

        async def submit_connected(member: EndpointRecord, request: GenerateRequest) -> None:
            async with asyncio.timeout(30.0):
                while not messaging.connected:
                    await asyncio.sleep(0.1)
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

#: Found by a scenario of its own only (`tests/sim/test_late_writes.py`).
NO_LANDING_TIME = Mutant(_ASTRAY, Shipped(ledger=_NoLandingTime))

#: By the name that the command line takes.
MUTANTS: dict[str, Mutant] = {
    "no-claim": Mutant(_ASTRAY, Shipped(ledger=_NoClaim)),
    "no-quarantine": Mutant(_ASTRAY, Shipped(ledger=_NoQuarantine)),
    "no-prefix-hold": Mutant("which is not kept for", Shipped(decode_scheduler=_NoPrefixHold)),
    "takes-back-claimed": Mutant(_ASTRAY, Shipped(ledger=_TakesBackClaimed)),
    "foreign-commits": Mutant("is wrong", Shipped(decode_rank=_ForeignCommits)),
    "no-attempt-id": Mutant("are taken", Shipped(decode_scheduler=_NoAttemptId)),
    "no-deadline": Mutant("still waits for remote KV", Shipped(ledger=_NoDeadline)),
    "first-token-twice": Mutant("tokens instead of", Shipped(first_tokens=_FirstTokenTwice)),
    "ack-on-dequeue": Mutant(_UNCLAIMED, Shipped(pulled=_ack_on_dequeue)),
    "no-cell": Mutant(_ASTRAY, Shipped(prefill_rank=_NoCell)),
    "refusal-ignored": _worker(_ASTRAY, _refusal_ignored),
    "metadata-by-address": _worker(_ASTRAY, _metadata_by_address),
    "silently-dropped": _worker(_UNCLAIMED, _silently_dropped),
    "wall-clock-deadline": Mutant(_UNCLAIMED, Shipped(pulled=_by_wall_clock)),
    "holds-too-many-jobs": _worker("jobs at a time", _hold_too_many),
    "delivers-twice": Mutant("was delivered twice", Shipped(queue=_DeliversTwice)),
    "late-resume": Mutant("the watch on", Shipped(store=_LateResume)),
    "lease-from-answer": Mutant("etcd has given up lease", Shipped(store=_LeaseFromAnswer)),
    "waits-for-broker": Mutant(
        "for a worker, and all were up", Shipped(transport=_waiting_for_broker)
    ),
    "moves-from-its-start": Mutant("is wrong", Shipped(failover_client=_StartsOver)),
    **PLANNER_MUTANTS,
}

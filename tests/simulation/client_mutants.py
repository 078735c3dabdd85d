"""Clients of NATS, etcd and workers without a safeguard, which the simulation must detect."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.queue import Lane
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.queue.puller import JetStreamJob
from dynamo_lite.request_plane.base import GenerateClient, MakeTransport, OnDeltas, OnLost
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.request_plane.migrating_request import MigratingRequest
from dynamo_lite.runtime.etcd.backend import EtcdBackend
from dynamo_lite.runtime.etcd.lease_thread import ThreadedLease
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.etcd.watch import EtcdWatch
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.store import Lease
from tests.simulation.mutant import Mutant
from tests.simulation.servers.etcd_backend import ETCD_URL
from tests.simulation.shipped import Shipped


class _RedeliveryLost(JetStreamQueue):
    _reconnected = False

    def _on_connection(self, connected: bool) -> None:
        super()._on_connection(connected)
        self._reconnected = self._reconnected or connected

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


class _StartsOver(FailoverClient):
    async def _migrate(self, flight: MigratingRequest, gone: str) -> None:
        flight._sent.clear()
        await super()._migrate(flight, gone)


class MovesFromItsStart(Shipped):
    """A request that migrates begins anew for its caller, too."""

    failover_client = _StartsOver


#: By the name that the command line takes.
CLIENT_MUTANTS: dict[str, Mutant] = {
    "redelivery-lost": Mutant(RedeliveryLost, "jobs on the queue"),
    "late-resume": Mutant(LateResume, "the watch on"),
    "lease-from-answer": Mutant(LeaseFromAnswer, "etcd has given up lease"),
    "waits-for-broker": Mutant(WaitsForBroker, "for a worker, and all were up"),
    "moves-from-its-start": Mutant(MovesFromItsStart, "is wrong"),
}

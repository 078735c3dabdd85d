"""Prefill workers without one of their safeguards, which the simulation must detect."""

import abc
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import msgspec

from dynamo_lite.disagg.prefill.claims import HeldGrant
from dynamo_lite.disagg.prefill.job_runner import JobEnd
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.policy.attempts.grants import GrantWanted
from dynamo_lite.protocol.grant import Grant
from dynamo_lite.protocol.prefill import decode_job
from dynamo_lite.protocol.records import EngineMetadata, KvRegion
from dynamo_lite.queue.base import Job, PrefillQueue
from dynamo_lite.runtime.permits import always_granted
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.store import Store
from dynamo_lite.services.backend import WorkerBackend
from dynamo_lite.services.prefill_worker import PrefillWorker
from dynamo_lite.transfer.directory import MetadataDirectory
from tests.simulation.engine.assembly import EngineSetup
from tests.simulation.engine.mover import SimMover
from tests.simulation.loop.process import PROCESS
from tests.simulation.mutant import Mutant
from tests.simulation.shipped import Shipped


class _Mutant(Shipped):
    """Its prefill workers are of another class."""

    kind: type[PrefillWorker]

    def prefill_worker(
        self, config: dict[str, Any], spec: ProcessSpec, parts: WorkerBackend
    ) -> PrefillWorker:
        return self.kind(config, spec, parts)


class _PullsOtherwise(Shipped, abc.ABC):
    """Something happens to each job that its prefill workers pull."""

    @contextlib.asynccontextmanager
    async def queue(
        self, opened: AbstractAsyncContextManager[PrefillQueue]
    ) -> AsyncIterator[PrefillQueue]:
        async with opened as queue:
            pull = queue.pull

            async def pull_otherwise(**wanted: Any) -> Job | None:
                job = await pull(**wanted)
                return None if job is None else await self._pulled(job)

            queue.pull = pull_otherwise
            yield queue

    @abc.abstractmethod
    async def _pulled(self, job: Job) -> Job | None:
        """What the worker gets; None: nothing."""


class AckOnDequeue(_PullsOtherwise):
    """A job is acknowledged when it is pulled, not when it has ended."""

    async def _pulled(self, job: Job) -> Job | None:
        await job.ack()
        return job


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


class _TrustingWorker(PrefillWorker):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        assert self._jobs is not None

        def unchecked(grant: Grant | None, wanted: GrantWanted, elapsed_s: float) -> HeldGrant:
            assert grant is not None and wanted
            return HeldGrant(grant.id, grant.for_s - elapsed_s)

        self._jobs._claims._checked = unchecked
        return facts


class NoGrantCheck(_Mutant):
    """A writer takes each grant for its own."""

    kind = _TrustingWorker


class _ByAddressWorker(PrefillWorker):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        assert self._jobs is not None
        self._jobs._runner._directory = _ByAddress(host.store, host.spec.namespace)
        return facts


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


class MetadataByAddress(_Mutant):
    """The memory layout of a decode engine is kept by its address, not by its incarnation."""

    kind = _ByAddressWorker


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


class SilentlyUsedUp(_Mutant):
    """A job that was delivered too often is dropped without a report to its engine."""

    kind = _SilentWorker


class WallClockDeadline(_PullsOtherwise):
    """A worker drops jobs that are past their deadline by its own host's wall clock."""

    async def _pulled(self, job: Job) -> Job | None:
        if decode_job(job.payload).deadline >= PROCESS.get().wall():
            return job
        await job.ack()
        return None


class _GreedyWorker(PrefillWorker):
    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        assert self._jobs is not None
        for index in range(2):
            host.spawn(self._jobs.run(), f"more-prefill-jobs-{index}")
        return facts


class HoldsTooManyJobs(_Mutant):
    """A worker pulls more jobs than it may hold at a time."""

    kind = _GreedyWorker


#: By the name that the command line takes.
PREFILL_MUTANTS: dict[str, Mutant] = {
    "ack-on-dequeue": Mutant(AckOnDequeue, "still waits for a claim"),
    "no-fence": Mutant(NoFence, "which is not the attempt's"),
    "no-permit": Mutant(NoPermit, "which is not the attempt's"),
    "no-grant-check": Mutant(NoGrantCheck, "which is not the attempt's"),
    "metadata-by-address": Mutant(MetadataByAddress, "which is not the attempt's"),
    "silently-used-up": Mutant(SilentlyUsedUp, "still waits for a claim"),
    "wall-clock-deadline": Mutant(WallClockDeadline, "still waits for a claim"),
    "holds-too-many-jobs": Mutant(HoldsTooManyJobs, "jobs at a time"),
}

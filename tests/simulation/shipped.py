"""The shipped parts that a simulation runs. A mutant replaces one of them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dynamo_lite.disagg.attempts.ledger import Ledger
from dynamo_lite.disagg.decode.first_tokens import FirstTokens
from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.disagg.queue.base import Job
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.planner.planner import Planner
from dynamo_lite.request_plane.client import MakeTransport
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.prefill_worker import PrefillWorker

C = TypeVar("C", Planner, PrefillWorker)


async def _as_it_is(job: Job) -> Job | None:
    return job


def _unchanged(make: MakeTransport, messaging: Messaging) -> MakeTransport:
    return make


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """Engines, components and clients as they are shipped."""

    ledger: type[Ledger] = Ledger
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    decode_rank: type[DecodeRank] = DecodeRank
    first_tokens: type[FirstTokens] = FirstTokens
    prefill_rank: type[PrefillRank] = PrefillRank
    prefill_worker: type[PrefillWorker] = PrefillWorker
    planner: type[Planner] = Planner
    failover_client: type[FailoverClient] = FailoverClient
    store: type[EtcdStore] = EtcdStore
    #: Of a prefill worker.
    queue: type[JetStreamQueue] = JetStreamQueue
    #: What a prefill worker gets of a job that it has pulled; None: nothing.
    pulled: Callable[[Job], Awaitable[Job | None]] = _as_it_is
    #: Changes a client's connections to the decode workers.
    transport: Callable[[MakeTransport, Messaging], MakeTransport] = _unchanged


@dataclass(frozen=True)
class Mutant:
    """The shipped parts without one safety."""

    #: In the text of the violation that this causes: the safety keeps this invariant.
    violates: str
    parts: Shipped


def after_start(component: type[C], change: Callable[[C, Host], None]) -> type[C]:
    """change: called with each component of this kind that has started."""

    class Changed(component):  # pyright: ignore[reportGeneralTypeIssues]
        async def start(self, host: Host) -> dict[str, Any]:
            facts = await super().start(host)
            change(self, host)  # pyright: ignore[reportArgumentType]
            return facts

    return Changed

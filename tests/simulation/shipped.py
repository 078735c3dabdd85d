"""The shipped parts that a simulation runs. A mutant replaces one of them."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from dynamo_lite.queue.base import PrefillQueue
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.request_plane.base import MakeTransport
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.runtime.etcd.backend import EtcdBackend
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.component import ProcessSpec
from dynamo_lite.services.backend import WorkerBackend
from dynamo_lite.services.planner.connector import Connector
from dynamo_lite.services.planner.planner import Planner
from dynamo_lite.services.prefill_worker import PrefillWorker
from tests.simulation.engine.assembly import Assembly
from tests.simulation.scenario import Ask
from tests.simulation.servers.etcd_backend import ETCD_URL


class Shipped(Assembly):
    """Engines, components, queue and store as they are shipped."""

    #: Opens the queue of a prefill worker.
    queue_client: type[JetStreamQueue] = JetStreamQueue

    #: Makes a Frontend's requests over the decode workers.
    failover_client: type[FailoverClient] = FailoverClient

    def prefill_worker(
        self, config: dict[str, Any], spec: ProcessSpec, parts: WorkerBackend
    ) -> PrefillWorker:
        return PrefillWorker(config, spec, parts)

    def planner(
        self, config: dict[str, Any], spec: ProcessSpec, connector: Connector | None
    ) -> Planner:
        return Planner(config, spec, connector)

    def queue(
        self, opened: AbstractAsyncContextManager[PrefillQueue]
    ) -> AbstractAsyncContextManager[PrefillQueue]:
        """The queue as a prefill worker uses it."""
        return opened

    def store(self, backend: EtcdBackend) -> EtcdStore:
        return EtcdStore(ETCD_URL, backend=backend)

    def timeout_s(self, ask: Ask) -> float | None:
        """The time limit that is sent with a request."""
        return ask.timeout_s

    def transport(self, make: MakeTransport, messaging: Messaging) -> MakeTransport:
        """A client's connections to the decode workers."""
        return make

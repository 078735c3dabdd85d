"""The connections to NATS, etcd and the queue that an engine's session opens."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.disagg.queue.base import PrefillQueue, QueueConfig
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.store import Store


class ServerClients(Protocol):
    """Each call opens a client of its own, as a context."""

    def messaging(self) -> AbstractAsyncContextManager[Messaging]: ...

    def store(self) -> AbstractAsyncContextManager[Store]: ...

    def queue(self, config: QueueConfig) -> AbstractAsyncContextManager[PrefillQueue]: ...


class NatsEtcdClients:
    """Implements `ServerClients` with NATS and etcd at the URLs of the engine's config."""

    def __init__(self, config: EngineConfig):
        self._config = config

    def messaging(self) -> NatsMessaging:
        return NatsMessaging(self._config.nats_url)

    def store(self) -> EtcdStore:
        return EtcdStore(self._config.etcd_url)

    def queue(self, config: QueueConfig) -> PrefillQueue:
        return JetStreamQueue(self._config.nats_url, self._config.namespace, config)

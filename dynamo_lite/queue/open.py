"""Opens the prefill queue of a graph, and checks whether that would be possible."""

import contextlib
from pathlib import Path

from nats.errors import Error

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import BrokerUnavailable
from dynamo_lite.queue.authenticated import AuthenticatedQueue
from dynamo_lite.queue.base import PrefillQueue, QueueConfig, QueueOptions
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.queue.malformed import readable
from dynamo_lite.queue.topology import Topology
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.secret import GraphSecret


def open_queue(
    url: str,
    namespace: str,
    config: QueueConfig,
    secret_file: str | Path | None,
    on_drop: OnDrop = uncounted,
) -> PrefillQueue:
    """A context. secret_file: None if jobs are not authenticated.

    Raises StartupError for a secret file that cannot be used.
    """
    subject = names.prefill_jobs_subject(namespace)
    stream = names.prefill_stream(namespace)
    queue = JetStreamQueue(url, stream=stream, subject=subject, config=config, on_drop=on_drop)
    if secret_file is None:
        return queue
    return AuthenticatedQueue(queue, GraphSecret(Path(secret_file)), subject, on_drop)


async def check_queue(messaging: NatsMessaging, namespace: str, options: QueueOptions) -> None:
    """Raises StartupError when a queue with these options could not be opened. Changes nothing.

    Problems that the broker does not report now appear when the queue is opened.
    """
    stream, subject = names.prefill_stream(namespace), names.prefill_jobs_subject(namespace)
    topology = Topology(stream, subject, QueueConfig.of(options))
    with contextlib.suppress(Error, BrokerUnavailable), readable("checking the queue"):
        await topology.check(messaging.client, clustered=messaging.clustered)

"""What decode and prefill workers have in common: heartbeats, and the queue's backlog."""

from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from prometheus_client import Gauge

from dynamo_lite.runtime.members.backlog import BacklogFollower, OnBacklog
from dynamo_lite.runtime.members.heartbeat import HeartbeatPublisher
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.engine_probe import EngineProbe


def start_heartbeats(
    host: Host, probe: EngineProbe, probing: Coroutine[Any, Any, None]
) -> HeartbeatPublisher:
    """Starts heartbeats with the probe's verdict. probing: runs the probe."""
    heartbeat = HeartbeatPublisher(
        host.messaging,
        namespace=host.spec.namespace,
        component=host.spec.component,
        lease_id=host.lease.id,
        verdict=probe.verdict,
    )
    host.spawn(probing, "engine-probe")
    host.spawn(heartbeat.run(), "health-beat")
    return heartbeat


async def follow_backlog(
    stack: AsyncExitStack, host: Host, on_backlog: OnBacklog = lambda backlog, done_tokens: None
) -> BacklogFollower:
    """Follows the prefill queue's backlog until `stack` is closed, with a gauge of its tokens."""
    backlog = BacklogFollower(
        host.spec.namespace, host.clock.monotonic, on_backlog=on_backlog, on_drop=host.drops
    )
    Gauge(
        "dynamo_lite_prefill_queue_tokens",
        "Prompt tokens that decode workers wait for: on the prefill queue, or claimed and not"
        " completely received",
        registry=host.registry,
    ).set_function(lambda: backlog.totals().tokens)
    await stack.enter_async_context(backlog.follow(host.messaging))
    return backlog

"""Heartbeats: once a second a worker publishes that it is alive, and whether it is healthy."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.health import Heartbeat
from dynamo_lite.runtime.messaging import Messaging

HEARTBEAT_PERIOD_S = 1.0

#: Whether the worker is healthy, and what is wrong if it is not.
HealthVerdict = tuple[bool, str]


async def publish_heartbeats(
    messaging: Messaging,
    *,
    namespace: str,
    component: str,
    lease_id: int,
    verdict: Callable[[], HealthVerdict],
) -> None:
    """Publishes one worker's heartbeats until it is cancelled. From then on only the worker's
    registration counts."""
    subject = names.health_subject(namespace, component)
    for number in itertools.count():
        ok, detail = verdict()
        heartbeat = Heartbeat(lease_id=lease_id, number=number, ok=ok, detail=detail[:512])
        # Without a broker no process expects heartbeats.
        with contextlib.suppress(Unavailable):
            await messaging.publish(subject, encode(heartbeat))
        await asyncio.sleep(HEARTBEAT_PERIOD_S)

"""Heartbeats: once a second a worker publishes that it is alive, and whether it is healthy."""

import asyncio
import contextlib
from collections.abc import Callable

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.health import Heartbeat
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import all_of

HEARTBEAT_PERIOD_S = 1.0

#: Whether the worker is healthy, and what is wrong if it is not.
HealthVerdict = tuple[bool, str]


class HeartbeatPublisher:
    """Publishes one worker's heartbeats: `run` is the body of a task, and returns after `stop`."""

    def __init__(
        self,
        messaging: Messaging,
        *,
        namespace: str,
        component: str,
        lease_id: int,
        verdict: Callable[[], HealthVerdict],
    ):
        self._messaging, self._lease_id = messaging, lease_id
        self._subject = names.health_subject(namespace, component)
        self._verdict = verdict
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            ok, detail = self._verdict()
            heartbeat = Heartbeat(
                lease_id=self._lease_id, number=number, ok=ok, detail=detail[:512]
            )
            number += 1
            # Without a broker no process expects heartbeats.
            with contextlib.suppress(Unavailable):
                await self._messaging.publish(self._subject, encode(heartbeat))
            await all_of([self._stopped], HEARTBEAT_PERIOD_S)

    def stop(self) -> None:
        """Stops heartbeats. From now on only the worker's registration counts."""
        self._stopped.set()

"""Pull requests to one lane's consumer, and the jobs that came for them.

A pull request lives on the server until a job or its expiry answers it. So each
one is remembered here until it is answered, whoever stops waiting meanwhile,
and a job that arrives for nobody is kept.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.errors import BrokerUnavailable
from dynamo_lite.queue.job import JetStreamJob
from dynamo_lite.queue.topology import Topology, consumer_name
from dynamo_lite.runtime.drops import OnDrop

_log = logging.getLogger(__name__)

#: Longest life of one pull request; a broken one is replaced after it.
_REQUEST_S = 5.0
#: How long the server's answer "nothing came" may be late.
GRACE_S = 0.25
_CLOSE_TIMEOUT_S = 1.0


@dataclass(eq=False)
class PullRequest:
    """until: when it is over, answered or not."""

    until: float


class LanePull:
    """on_change: something was answered. on_missing: the consumer is gone, or out of reach.

    requests: unanswered ones. arrived: jobs that nobody has taken yet.
    """

    def __init__(
        self,
        client: Client,
        topology: Topology,
        lane: Lane,
        *,
        on_change: Callable[[], None],
        on_missing: Callable[[], None],
        on_end: Callable[[JetStreamJob], None],
        on_drop: OnDrop,
    ):
        self._client, self._config = client, topology.config
        self.lane = lane
        self._on_change, self._on_missing, self._on_end = on_change, on_missing, on_end
        self._on_drop = on_drop
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{topology.stream}.{consumer_name(lane)}"
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self.requests: deque[PullRequest] = deque()
        self.arrived: deque[JetStreamJob] = deque()
        self.pulling = 0

    async def open(self) -> None:
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_message)

    async def close(self) -> None:
        """Naks what arrives or arrived for nobody. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    if self._client.is_connected:
                        # What the server sent before it heard of this still arrives.
                        await subscription.drain()
                    else:
                        await subscription.unsubscribe()
        while self.arrived:
            await give_back(self.arrived.popleft())

    async def ask(self, timeout_s: float) -> PullRequest | None:
        """Asks the broker for one job, which has so long to come. None: it is out of reach."""
        life_s = min(timeout_s, _REQUEST_S)
        ask: dict[str, int | bool] = {"batch": 1}
        if life_s > 0.001:
            ask["expires"] = int(life_s * 1e9)
        else:
            ask["no_wait"] = True
        request = PullRequest(loop_time() + max(life_s, 0.0) + GRACE_S)
        self.requests.append(request)
        try:
            await self._client.publish(self._next, msgspec.json.encode(ask), self._inbox)
        except (errors.Error, OSError) as exc:
            _log.debug("cannot ask for a job: %r", exc)
            self._on_missing()
            return None
        return request

    def drop_unanswered(self, now: float) -> None:
        while self.requests and self.requests[0].until <= now:
            self.requests.popleft()

    async def _on_message(self, message: Msg) -> None:
        if self.requests:
            self.requests.popleft()
        status = message.headers.get("Status") if message.headers else None
        # Whoever pushes a job chooses its headers; only the broker's own word has no reply.
        if message.reply or status is None:
            self._take_in(message)
        elif status not in ("404", "408"):
            _log.debug("pull answered with %s", message.headers)
            self._on_missing()
        self._on_change()

    def _take_in(self, message: Msg) -> None:
        try:
            job = JetStreamJob(
                self._client,
                message,
                loop_time(),
                self._config.push_timeout_s,
                self._config.max_deliver,
                self._on_end,
            )
        except (errors.Error, ValueError, IndexError, OverflowError, OSError) as exc:
            _log.warning("dropped what is no delivery of a job: %r", exc)
            self._on_drop("job")
        else:
            self.arrived.append(job)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


async def give_back(job: JetStreamJob) -> None:
    with contextlib.suppress(BrokerUnavailable):
        await job.nak()

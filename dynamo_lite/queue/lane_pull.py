"""Pull requests to the consumer of one lane, and the jobs that it delivers.

A pull request stays on the server until a job or its timeout answers it. So each one is kept
here until it is answered, also when its caller stops waiting, and a job that arrives without
a waiting caller is kept for the next one.
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

logger = logging.getLogger(__name__)

#: Timeout of one pull request on the server. A lost one is replaced after it.
_REQUEST_S = 5.0
#: How much later than its timeout a pull request may be answered.
GRACE_S = 0.25
_CLOSE_TIMEOUT_S = 1.0
#: How long the answer to a job waits for the broker's confirmation.
_CONFIRM_S = 1.0


@dataclass(eq=False)
class PullRequest:
    """A pull request that the server has not answered yet."""

    #: Event loop time after which it counts as lost.
    until: float


class LanePull:
    """The pull requests and the delivered jobs of one lane.

    on_change: called when a request was answered. on_missing: called when the consumer is gone
    or the broker is unavailable. on_end: see `JetStreamJob`.
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
        #: Unanswered requests, oldest first.
        self.requests: deque[PullRequest] = deque()
        #: Delivered jobs that no `pull` has returned yet, oldest first.
        self.arrived: deque[JetStreamJob] = deque()
        #: How many `pull` calls wait for this lane; written by Puller.
        self.pulling = 0

    async def open(self) -> None:
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_message)

    async def close(self) -> None:
        """Unsubscribes, and naks the jobs that no `pull` has returned. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    if self._client.is_connected:
                        # Jobs that the server has sent before it unsubscribes still arrive.
                        await subscription.drain()
                    else:
                        await subscription.unsubscribe()
        while self.arrived:
            await give_back(self.arrived.popleft())

    async def ask(self, timeout_s: float) -> PullRequest | None:
        """Requests one job from the broker, with a timeout. None: the broker is unavailable."""
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
            logger.debug("cannot send a pull request: %r", exc)
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
        # The headers alone prove nothing, because the sender of a job chooses them. Only the
        # broker's own messages have no reply subject.
        if message.reply or status is None:
            self._add_job(message)
        elif status not in ("404", "408"):
            logger.debug("the pull request was refused with %s", message.headers)
            self._on_missing()
        self._on_change()

    def _add_job(self, message: Msg) -> None:
        try:
            job = JetStreamJob(
                self._client,
                message,
                loop_time(),
                _CONFIRM_S,
                self._config.max_deliver,
                self._on_end,
            )
        except (errors.Error, ValueError, IndexError, OverflowError, OSError) as exc:
            logger.warning("dropped an unexpected message on the pull inbox: %r", exc)
            self._on_drop("job")
        else:
            self.arrived.append(job)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


async def give_back(job: JetStreamJob) -> None:
    with contextlib.suppress(BrokerUnavailable):
        await job.nak()

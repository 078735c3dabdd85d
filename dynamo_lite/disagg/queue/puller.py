"""Pulls from JetStream consumers, earlier lanes first. Each job is delivered once.

A pull first checks one lane after the other for a waiting job, then waits for all of them. A
lane with an unanswered pull request is empty.

A pull request stays on the server until a job or its timeout answers it. So each one is kept
here until it is answered, also when its caller stops waiting, and a job that arrives without
a waiting caller is kept for the next one.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dynamo_lite.disagg.decision.lanes import Lane, LaneTurns
from dynamo_lite.disagg.queue.base import Job
from dynamo_lite.disagg.queue.topology import Topology, consumer_name

logger = logging.getLogger(__name__)

#: Timeout of one pull request on the server. A lost one is replaced after it.
_REQUEST_S = 5.0
#: How much later than its timeout a pull request may be answered.
GRACE_S = 0.25
_CLOSE_TIMEOUT_S = 1.0


@dataclass(eq=False)
class PullRequest:
    """A pull request that the server has not answered yet."""

    #: Event loop time after which it counts as lost.
    until: float


class LanePull:
    """The pull requests and the delivered jobs of one lane."""

    def __init__(self, client: Client, topology: Topology, lane: Lane, owner: "Puller"):
        self._client, self._owner = client, owner
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{topology.stream}.{consumer_name(lane)}"
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        #: Unanswered requests, oldest first.
        self.requests: deque[PullRequest] = deque()
        #: Delivered jobs that no `pull` has returned yet, oldest first.
        self.arrived: deque[Job] = deque()

    async def open(self) -> None:
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_message)

    async def close(self) -> None:
        """Unsubscribes. Jobs that the server had sent before have arrived then. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    if self._client.is_connected:
                        await subscription.drain()
                    else:
                        await subscription.unsubscribe()

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
            self._owner.on_gone()
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
            if (job := self._owner.job_of(message)) is not None:
                self.arrived.append(job)
        elif status not in ("404", "408"):
            logger.debug("the pull request was refused with %s", message.headers)
            self._owner.on_gone()
        self._owner.notify()


class Puller:
    """Async context manager. job_of: the job in a message; None: it is to be dropped."""

    def __init__(self, client: Client, topology: Topology, job_of: Callable[[Msg], Job | None]):
        self._topology, self.job_of = topology, job_of
        self._lanes = {lane: LanePull(client, topology, lane, self) for lane in Lane}
        self._turns = LaneTurns()
        #: Whether jobs are requested.
        self._ready = True
        self._stopping = self._stopped = False
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        for asking in self._lanes.values():
            await asking.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def pull(self, timeout_s: float, lanes: Sequence[Lane]) -> Job | None:
        """lanes: the lanes to pull from."""
        deadline = loop_time() + timeout_s
        chosen = [self._lanes[lane] for lane in lanes]
        if (job := self._pop_arrived(chosen)) is not None:
            return job
        if (job := await self._check_lanes(lanes)) is not None:
            return job
        return await self._wait_for_one(chosen, deadline)

    async def _check_lanes(self, lanes: Sequence[Lane]) -> Job | None:
        """Returns a waiting job of the first lane that has one."""
        order = self._turns.order(lanes)
        for lane in order:
            asking = self._lanes[lane]
            request = None if asking.requests or not self._ready else await asking.ask(0.0)
            while request in asking.requests and not self._stopped:
                change, now = self._change, loop_time()
                asking.drop_unanswered(now)
                await asyncio.wait({change}, timeout=max(request.until - now, 0.0))
            if (job := self._pop_arrived([asking])) is not None:
                self._turns.took(lane, order)
                return job
        return None

    async def _wait_for_one(self, chosen: list[LanePull], deadline: float) -> Job | None:
        """Asks each lane for one job, unless another pull does: it returns one job, and a job of
        another lane must wait for the next pull.

        After the deadline it waits for the answers to its own requests only. Those of other pulls
        may last longer, and a lane that none of them asks would be forgotten meanwhile.
        """
        own: dict[LanePull, PullRequest] = {}
        while not self._stopped:
            change = self._change
            if (job := self._pop_arrived(chosen)) is not None:
                return job
            now = loop_time()
            for asking in chosen:
                asking.drop_unanswered(now)
            own = {asking: mine for asking, mine in own.items() if mine in asking.requests}
            if now >= deadline + GRACE_S or (now >= deadline and not own):
                return None
            if now < deadline:
                for asking in chosen:
                    if self._ready and not asking.requests:
                        if (request := await asking.ask(deadline - now)) is not None:
                            own[asking] = request
                ends = [asking.requests[0].until for asking in chosen if asking.requests]
                ends.append(deadline)
            else:
                ends = [mine.until for mine in own.values()]
            await asyncio.wait({change}, timeout=max(min(ends) - loop_time(), 0.0))
        return self._pop_arrived(chosen)

    def pause(self) -> None:
        """To be called when the connection or a consumer is gone, and all pull requests with it."""
        self._ready = False
        for asking in self._lanes.values():
            asking.requests.clear()
        self.notify()

    def resume(self) -> None:
        self._ready = not self._stopping
        self.notify()

    async def stop(self) -> None:
        """Requests no job any more. Every `pull` ends when what was sent before has arrived, and
        been pulled. Idempotent."""
        self._stopping, self._ready = True, False
        for asking in self._lanes.values():
            await asking.close()
        self._stopped = True
        self.notify()

    def on_gone(self) -> None:
        """A lane's consumer is gone, or the broker unavailable."""
        self.pause()
        self._topology.missing.set()

    def _pop_arrived(self, chosen: Iterable[LanePull]) -> Job | None:
        """Removes and returns the oldest delivered job."""
        return next((asking.arrived.popleft() for asking in chosen if asking.arrived), None)

    def notify(self) -> None:
        """Something has changed that a `pull` may wait for."""
        if not self._change.done():
            self._change.set_result(None)
        self._change = asyncio.get_running_loop().create_future()


def loop_time() -> float:
    return asyncio.get_running_loop().time()

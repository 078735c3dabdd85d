"""Pulling from a JetStream consumer so that no job gets lost on the way.

A pull request lives on the server until a job or its expiry answers it. So each
one is remembered here until it is answered, whoever stops waiting meanwhile,
and a job that arrives for nobody waits for the next `pull`.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Self

import msgspec
from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dynamo_lite.protocol.errors import BrokerUnavailable
from dynamo_lite.queue.job import JetStreamJob
from dynamo_lite.queue.topology import CONSUMER, Topology
from dynamo_lite.runtime.drops import OnDrop, uncounted

_log = logging.getLogger(__name__)

#: Longest life of one pull request; a broken one is replaced after it.
_REQUEST_S = 5.0
#: How long the server's answer "nothing came" may be late.
_GRACE_S = 0.25
_CLOSE_TIMEOUT_S = 1.0


class Puller:
    """Async context manager; leaving it naks what was pulled and not answered.

    on_missing: called when the broker says that the consumer is gone.
    """

    def __init__(
        self,
        client: Client,
        topology: Topology,
        on_missing: Callable[[], None],
        on_drop: OnDrop = uncounted,
    ):
        self._client = client
        self._config = topology.config
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{topology.stream}.{CONSUMER}"
        self._on_missing, self._on_drop = on_missing, on_drop
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._requests: deque[float] = deque()  # when each unanswered one is over
        self._arrived: deque[JetStreamJob] = deque()
        self._held: set[JetStreamJob] = set()  # pulled, not answered
        self._pulling = 0
        self._ready = True
        self._stopped = False
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_message)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        for job in list(self._held):
            await _nak(job)
        self._held.clear()

    async def pull(self, timeout_s: float) -> JetStreamJob | None:
        deadline = _now() + timeout_s
        self._pulling += 1
        asked = False
        try:
            while not self._stopped:
                change = self._change
                if (job := await self._take()) is not None:
                    return job
                now = _now()
                self._drop_unanswered(now)
                if now >= deadline and (asked or not self._ready) and not self._requests:
                    return None
                if now >= deadline + _GRACE_S:
                    return None
                if self._ready and len(self._requests) < self._pulling:
                    if not asked or now < deadline:
                        asked = await self._request(deadline - now) or asked
                await self._wait(change, deadline)
            return None
        finally:
            self._pulling -= 1

    def pause(self) -> None:
        """The connection or the consumer is gone, and every request with it."""
        self._ready = False
        self._requests.clear()
        self._notify()

    def resume(self) -> None:
        self._ready = True
        self._notify()

    async def stop(self) -> None:
        """Ends every `pull`, and naks what arrives or arrived for nobody. Idempotent."""
        self._stopped = True
        self._notify()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    if self._client.is_connected:
                        # What the server sent before it heard of this still arrives.
                        await subscription.drain()
                    else:
                        await subscription.unsubscribe()
        while self._arrived:
            await _nak(self._arrived.popleft())

    async def _take(self) -> JetStreamJob | None:
        """The oldest arrived job that is still ours and worth another try."""
        while self._arrived:
            job = self._arrived.popleft()
            if _now() - job.arrived_at >= self._config.ack_wait_s:
                continue  # the broker has given it to somebody else
            if job.deliveries > self._config.max_deliver:
                _log.warning("job %d dropped after %d deliveries", job.sequence, job.deliveries - 1)
                with contextlib.suppress(BrokerUnavailable):
                    await job.term()
                continue
            self._held.add(job)
            return job
        return None

    async def _request(self, timeout_s: float) -> bool:
        """Asks the broker for one job. Returns False when it is out of reach."""
        life_s = min(timeout_s, _REQUEST_S)
        ask: dict[str, int | bool] = {"batch": 1}
        if life_s > 0.001:
            ask["expires"] = int(life_s * 1e9)
        else:
            ask["no_wait"] = True
        self._requests.append(_now() + max(life_s, 0.0) + _GRACE_S)
        try:
            await self._client.publish(self._next_subject, msgspec.json.encode(ask), self._inbox)
        except (errors.Error, OSError) as exc:
            _log.debug("cannot ask for a job: %r", exc)
            self.pause()
            self._on_missing()
            return False
        return True

    async def _wait(self, change: asyncio.Future[None], deadline: float) -> None:
        """Until something changes, a request is overdue, or the deadline."""
        until = deadline
        if self._requests:
            until = self._requests[0] if _now() >= deadline else min(deadline, self._requests[0])
        await asyncio.wait({change}, timeout=max(until - _now(), 0.0))

    async def _on_message(self, message: Msg) -> None:
        if self._requests:
            self._requests.popleft()
        status = message.headers.get("Status") if message.headers else None
        # Whoever pushes a job chooses its headers; only the broker's own word has no reply.
        if message.reply or status is None:
            self._take_in(message)
        elif status not in ("404", "408"):
            _log.debug("pull answered with %s", message.headers)
            self.pause()
            self._on_missing()
        self._notify()

    def _take_in(self, message: Msg) -> None:
        timeout_s = self._config.push_timeout_s
        try:
            job = JetStreamJob(self._client, message, _now(), timeout_s, self._held.discard)
        except (errors.Error, ValueError, IndexError, OverflowError, OSError) as exc:
            _log.warning("dropped what is no delivery of a job: %r", exc)
            self._on_drop("job")
        else:
            self._arrived.append(job)

    def _drop_unanswered(self, now: float) -> None:
        while self._requests and self._requests[0] <= now:
            self._requests.popleft()

    def _notify(self) -> None:
        if not self._change.done():
            self._change.set_result(None)
        self._change = asyncio.get_running_loop().create_future()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _nak(job: JetStreamJob) -> None:
    with contextlib.suppress(BrokerUnavailable):
        await job.nak()

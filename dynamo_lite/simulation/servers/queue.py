"""The prefill queue as a simulated process uses it, with a connection of its own."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from dynamo_lite.policy.lanes import LaneTurns
from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.errors import BrokerUnavailable, PushAmbiguous, StartupError
from dynamo_lite.queue.base import QueueConfig, QueueDepth
from dynamo_lite.queue.incarnation import Incarnations
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.job import SimJob
from dynamo_lite.simulation.servers.link import LinkDown, ServerLink
from dynamo_lite.simulation.servers.messaging import SILENCE_S
from dynamo_lite.simulation.servers.nats import PORT

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_API_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 1.0
_REPAIR_INTERVAL_S = 0.1
#: Longest life of one pull request; a broken one is replaced after it.
_REQUEST_S = 5.0
#: How long the server's answer "nothing came" may be late.
_GRACE_S = 0.25


class SimQueue:
    """Implements PrefillQueue for the process in which it is made, as on JetStream.

    A pull request lives on the server until a job or its expiry answers it; a job
    that arrives when nobody waits any more is kept for the next `pull`.
    """

    def __init__(
        self,
        network: Network,
        *,
        stream: str,
        subject: str,
        config: QueueConfig | None = None,
        port: int = PORT,
    ):
        self._loop = network.loop
        self._stream = stream
        self._subject = subject
        self._config = config or QueueConfig()
        self._link = ServerLink(
            network,
            network.loop.current_process(),
            port,
            silence_s=SILENCE_S,
            on_push=self._take_push,
            on_state=self._on_state,
        )
        self._incarnations = Incarnations()
        self._missing = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._requests: dict[int, float] = {}  # unanswered -> when it is over
        self._request_number = 0
        self._arrived: deque[SimJob] = deque()
        self._held: dict[SimJob, None] = {}  # pulled, not answered
        self._turns = LaneTurns()
        self._pulling = 0
        self._ready = self._stopped = False
        self._change: asyncio.Future[None] = self._loop.create_future()

    def __repr__(self) -> str:
        return f"SimQueue({self._stream}, held={len(self._held)}, {self._link!r})"

    @property
    def incarnation(self) -> int:
        return self._incarnations.number

    def on_lost(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        return self._incarnations.watch(callback)

    async def __aenter__(self) -> Self:
        try:
            try:
                await self._link.open(_CONNECT_TIMEOUT_S)
                await self._ensure()
            except (TimeoutError, BrokerUnavailable) as exc:
                raise StartupError(f"JetStream cannot be used: {exc}") from exc
        except BaseException:
            self._link.close()
            raise
        self._resume()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self._stream}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        await self.stop_pulling()
        for job in list(self._held):
            await _nak(job)
        self._link.close()

    async def push(self, payload: bytes, *, message_id: str, lane: Lane = Lane.LONG) -> int:
        try:
            return await self._push(payload, message_id, lane)
        except LookupError:
            await self._ensure()
        try:
            return await self._push(payload, message_id, lane)
        except LookupError as exc:
            raise BrokerUnavailable(f"no stream takes {self._subject}") from exc

    async def delete(self, sequence: int) -> bool:
        try:
            return await self._call("delete", self._stream, sequence)
        except LookupError:
            return False

    async def depth(self) -> QueueDepth:
        try:
            return await self._call("depth", self._stream)
        except LookupError:
            self._missing.set()
            return QueueDepth(waiting=0, in_flight=0)

    async def pull(self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> SimJob | None:
        deadline = self._loop.time() + timeout_s
        order = self._turns.order(lanes)
        self._pulling += 1
        asked = False
        try:
            while not self._stopped:
                change = self._change
                if (job := self._take(order)) is not None:
                    return job
                now = self._loop.time()
                self._requests = {n: end for n, end in self._requests.items() if end > now}
                if now >= deadline and (asked or not self._ready) and not self._requests:
                    return None
                if now >= deadline + _GRACE_S:
                    return None
                if self._ready and len(self._requests) < self._pulling:
                    if not asked or now < deadline:
                        asked = self._request(deadline - now, order) or asked
                await self._wait(change, deadline)
            return None
        finally:
            self._pulling -= 1

    async def stop_pulling(self) -> None:
        self._stopped = True
        self._notify()
        with contextlib.suppress(LinkDown, TimeoutError):
            await self._link.call("stop_pulls", timeout_s=_CLOSE_TIMEOUT_S)
        while self._arrived:
            await _nak(self._arrived.popleft())

    # Pulling

    def _take(self, order: Sequence[Lane]) -> SimJob | None:
        """The oldest arrived job of these lanes that is still ours."""
        for job in [job for job in self._arrived if job.lane in order]:
            self._arrived.remove(job)
            if self._loop.time() - job.arrived_at < self._config.ack_wait_s:
                self._held[job] = None
                self._turns.took(job.lane, order)
                return job
        return None

    def _request(self, timeout_s: float, order: Sequence[Lane]) -> bool:
        """Asks the server for one job, of the first of these lanes that has any. Returns False
        when it is out of reach."""
        life_s = max(0.0, min(timeout_s, _REQUEST_S))
        self._request_number += 1
        number = self._request_number
        self._requests[number] = self._loop.time() + life_s + _GRACE_S
        try:
            self._link.send(("pull", number, self._stream, life_s, order))
        except LinkDown:
            self._pause()
            self._missing.set()
            return False
        return True

    async def _wait(self, change: asyncio.Future[None], deadline: float) -> None:
        """Until something changes, a request is overdue, or the deadline."""
        now = self._loop.time()
        until = deadline
        if self._requests:
            overdue = min(self._requests.values())
            until = overdue if now >= deadline else min(deadline, overdue)
        await asyncio.wait({change}, timeout=max(until - now, 0.0))

    def _take_push(self, item: Any) -> None:
        name, number, *told = item
        self._requests.pop(number, None)
        if name == "job":
            job = SimJob(
                self._link,
                self._stream,
                tuple(told),
                arrived_at=self._loop.time(),
                timeout_s=self._config.push_timeout_s,
                max_deliver=self._config.max_deliver,
                on_end=self._ended,
            )
            if self._stopped:
                with contextlib.suppress(BrokerUnavailable):
                    job.give_back()
                return
            self._arrived.append(job)
        elif name == "no stream":
            self._pause()
            self._missing.set()
        self._notify()

    def _ended(self, job: SimJob) -> None:
        self._held.pop(job, None)

    def _pause(self) -> None:
        self._ready = False
        self._requests.clear()
        self._notify()

    def _resume(self) -> None:
        self._ready = True
        self._notify()

    def _notify(self) -> None:
        if not self._change.done():
            self._change.set_result(None)
        self._change = self._loop.create_future()

    # The server's side of the queue

    def _on_state(self, up: bool) -> None:
        self._pause()
        if up:
            self._missing.set()

    async def _keep(self) -> None:
        """Creates again what the server lost, and lets pulls go on."""
        while True:
            await self._missing.wait()
            self._missing.clear()
            try:
                await self._ensure()
            except (BrokerUnavailable, StartupError) as exc:
                logger.warning("queue %s: %s", self._stream, exc)
                self._missing.set()
            else:
                self._resume()
            await asyncio.sleep(_REPAIR_INTERVAL_S)

    async def _ensure(self) -> None:
        stream = await self._call("open", self._stream, self._subject, self._config)
        self._incarnations.seen(stream)

    async def _push(self, payload: bytes, message_id: str, lane: Lane) -> int:
        try:
            return await self._link.call(
                "push",
                self._stream,
                payload,
                message_id,
                lane,
                timeout_s=self._config.push_timeout_s,
                loosely=True,
                outlives_link=True,
            )
        except LinkDown as exc:
            raise BrokerUnavailable("NATS is disconnected") from exc
        except TimeoutError as exc:
            wait_s = self._config.push_timeout_s
            raise PushAmbiguous(f"no answer to the push within {wait_s:g} s") from exc

    async def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            return await self._link.call(
                operation, *arguments, timeout_s=_API_TIMEOUT_S, outlives_link=True
            )
        except LinkDown as exc:
            raise BrokerUnavailable(f"{operation}: NATS is disconnected") from exc
        except TimeoutError as exc:
            raise BrokerUnavailable(f"{operation}: no answer in time") from exc


async def _nak(job: SimJob) -> None:
    with contextlib.suppress(BrokerUnavailable):
        await job.nak()

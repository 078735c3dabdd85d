"""Pulls from JetStream consumers, earlier lanes first, without losing jobs.

A pull first checks one lane after the other for a waiting job, then waits for all of them. A
lane with an unanswered pull request is empty.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from nats.aio.client import Client

from dynamo_lite.policy.decision.lanes import LaneTurns
from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.queue.job import JetStreamJob
from dynamo_lite.queue.lane_pull import GRACE_S, LanePull, PullRequest, give_back, loop_time
from dynamo_lite.queue.topology import Topology
from dynamo_lite.runtime.drops import OnDrop, uncounted


class Puller:
    """Async context manager; leaving it naks the pulled jobs that were not answered.

    on_missing: called when the broker reports that a consumer is gone.
    """

    def __init__(
        self,
        client: Client,
        topology: Topology,
        on_missing: Callable[[], None],
        on_drop: OnDrop = uncounted,
    ):
        self._config = topology.config
        self._on_missing = on_missing
        self._held: dict[JetStreamJob, None] = {}  # pulled, not answered, oldest first
        self._lanes = {
            lane: LanePull(
                client,
                topology,
                lane,
                on_change=self._notify,
                on_missing=self._on_gone,
                on_end=self._on_end,
                on_drop=on_drop,
            )
            for lane in topology.config.lanes
        }
        self._turns = LaneTurns()
        self._ready = True
        self._stopped = False
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        for asking in self._lanes.values():
            await asking.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        for job in list(self._held):
            await give_back(job)
        self._held.clear()

    async def pull(self, timeout_s: float, lanes: Sequence[Lane]) -> JetStreamJob | None:
        """lanes: the lanes to pull from; lanes that the queue does not have are ignored."""
        chosen = [self._lanes[lane] for lane in lanes if lane in self._lanes]
        deadline = loop_time() + timeout_s
        for asking in chosen:
            asking.pulling += 1
        try:
            if (job := self._pop_arrived(chosen)) is not None:
                return job
            looked = len(chosen) > 1
            if looked and (job := await self._check_lanes(lanes)) is not None:
                return job
            return await self._wait_for_one(chosen, deadline, asked=looked or not chosen)
        finally:
            for asking in chosen:
                asking.pulling -= 1

    async def _check_lanes(self, lanes: Sequence[Lane]) -> JetStreamJob | None:
        """Returns a waiting job of the first lane that has one."""
        order = [lane for lane in self._turns.order(lanes) if lane in self._lanes]
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

    async def _wait_for_one(
        self, chosen: list[LanePull], deadline: float, *, asked: bool
    ) -> JetStreamJob | None:
        """asked: whether the lanes were checked for waiting jobs before.

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
            may_ask = not asked and any(map(self._may_ask, chosen))
            if now >= deadline and not own and not may_ask:
                return None
            if now >= deadline + GRACE_S:
                return None
            for asking in chosen:
                if self._may_ask(asking) and (not asked or now < deadline):
                    if (request := await asking.ask(deadline - now)) is not None:
                        own[asking], asked = request, True
            if now < deadline:
                waited_for = [asking.requests[0] for asking in chosen if asking.requests]
            else:
                waited_for = list(own.values())
            await self._wait(waited_for, change, deadline)
        return None

    def _may_ask(self, asking: LanePull) -> bool:
        """With several lanes only one request per lane: a pull requests from all lanes but returns
        one job, and a job of another lane must wait for the next pull."""
        most = asking.pulling if len(self._lanes) == 1 else 1
        return self._ready and len(asking.requests) < most

    def pause(self) -> None:
        """To be called when the connection or a consumer is gone, and all pull requests with it."""
        self._ready = False
        for asking in self._lanes.values():
            asking.requests.clear()
        self._notify()

    def resume(self) -> None:
        self._ready = True
        self._notify()

    async def stop(self) -> None:
        """Ends every `pull`, and naks the jobs that none has returned. Idempotent."""
        self._stopped = True
        self._notify()
        for asking in self._lanes.values():
            await asking.close()

    def _on_end(self, job: JetStreamJob) -> None:
        self._held.pop(job, None)

    def _on_gone(self) -> None:
        self.pause()
        self._on_missing()

    def _pop_arrived(self, chosen: Iterable[LanePull]) -> JetStreamJob | None:
        """Removes and returns the oldest delivered job whose ack_wait has not ended."""
        for asking in chosen:
            while asking.arrived:
                job = asking.arrived.popleft()
                if loop_time() - job.arrived_at >= self._config.ack_wait_s:
                    continue  # the broker has delivered it to another worker
                self._held[job] = None
                return job
        return None

    @staticmethod
    async def _wait(
        requests: Sequence[PullRequest],
        change: asyncio.Future[None],
        deadline: float,
    ) -> None:
        """Waits until a request is answered, one of `requests` counts as lost, or the deadline if
        that is still to come."""
        now = loop_time()
        ends = [request.until for request in requests]
        if now < deadline or not ends:
            ends.append(deadline)
        await asyncio.wait({change}, timeout=max(min(ends) - now, 0.0))

    def _notify(self) -> None:
        if not self._change.done():
            self._change.set_result(None)
        self._change = asyncio.get_running_loop().create_future()

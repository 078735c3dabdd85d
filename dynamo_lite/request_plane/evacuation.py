"""Migrates requests off decode workers that drain, where that is faster than finishing them.

The old worker continues a request until another worker has accepted it. Until then the deltas of
the old worker are held back. If no worker accepts the request, the client gets the held deltas,
and the request stays.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from dynamo_lite.policy.scaling.drain import Move, move_or_finish
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.request_plane.failover_stats import FailoverStats
from dynamo_lite.request_plane.flight_costs import FlightCosts, running
from dynamo_lite.request_plane.migrating_request import Held, MigratingRequest
from dynamo_lite.request_plane.placement import Placement
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: How many requests migrate off one worker at a time. Each migration computes a prompt on a worker
#: that serves other requests.
_AT_A_TIME = 4
#: Timeout of one migration. The client gets no token during it.
_MOVE_S = 5.0


class Evacuation:
    """tasks: owns the migrations. abort: ends attempts at their workers. take: handles deltas
    as if they had just arrived. lose: handles the loss of a request's worker, with the reason."""

    def __init__(
        self,
        placer: Placement,
        tasks: OwnedTasks,
        costs: FlightCosts,
        stats: FailoverStats,
        *,
        abort: Callable[[Sequence[str]], Awaitable[None]],
        take: Callable[[list[TokenDelta]], None],
        lose: Callable[[MigratingRequest, str], None],
    ):
        self._placer, self._tasks = placer, tasks
        self._costs, self._stats = costs, stats
        self._abort, self._take, self._lose = abort, take, lose

    def leave(self, lease_id: int, flights: Iterable[MigratingRequest]) -> None:
        """The worker leaves. flights: all requests of this client."""
        gains = [
            (found.saves_s, flight)
            for flight in flights
            if (found := self._judged(flight, lease_id)) is not None
        ]
        gains.sort(key=lambda gain: (-gain[0], gain[1].request_id))
        waiting = deque(flight for _, flight in gains)
        for number in range(min(_AT_A_TIME, len(waiting))):
            name = f"moves {number} off {lease_id:x}"
            self._tasks.start(self._move_all(lease_id, waiting), name=name)

    def _judged(self, flight: MigratingRequest, lease_id: int) -> Move | None:
        """Returns how the request moves; None if it does not run at this worker, or should
        stay."""
        if flight.over or not flight.accepted or not flight.wire_id or flight.held is not None:
            return None
        if flight.member is None or flight.member.lease_id != lease_id:
            return None
        now = asyncio.get_running_loop().time()
        found = move_or_finish(running(flight, now), self._costs.pace)
        return found if isinstance(found, Move) else None

    async def _move_all(self, lease_id: int, waiting: deque[MigratingRequest]) -> None:
        while waiting:
            flight = waiting.popleft()
            why = self._judged(flight, lease_id)
            if why is not None:
                # A task of its own: the request's end cancels it. Held at once: the worker may be
                # lost before the task begins.
                move = self._move(flight, flight.move_kind, flight.hold(), why)
                name = f"move {flight.request_id}"
                flight.migration = task = self._tasks.start(move, name=name)
                await asyncio.wait([task])

    async def _move(self, flight: MigratingRequest, how: str, held: Held, why: Move) -> None:
        try:
            async with asyncio.timeout(_MOVE_S):
                await self._placer.place(flight, moving=False)
        except (DynamoLiteError, TimeoutError) as exc:
            logger.info("request %s stays at its draining worker: %s", flight.request_id, exc)
            self._back(flight)
            return
        except Exception:
            logger.exception(
                "request %s: migration off its draining worker failed", flight.request_id
            )
            self._back(flight)
            return
        if flight.over:
            return
        flight.held = None
        self._stats.moved[how] += 1
        self._stats.drained += 1
        logger.info(
            "request %s: worker draining; migrated (%s): %s", flight.request_id, how, why.reason
        )
        if self._placer.attempts.pop(held.wire_id, None) is not None:
            await self._abort([held.wire_id])

    def _back(self, flight: MigratingRequest) -> None:
        """The request stays at its worker, unless that worker has been lost meanwhile."""
        held = flight.held
        if flight.over or held is None:
            return
        flight.go_back()
        if held.lost:
            flight.wire_id = ""
            self._lose(flight, held.lost)
        elif held.deltas:
            self._take(held.deltas)

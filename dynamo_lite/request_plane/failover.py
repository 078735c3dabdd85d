"""Requests over many workers: each ends exactly once, even when its worker is lost.

Owns the choice of a worker, the retry on another one until one accepts, the migration of an
accepted request whose worker is lost, and the requests' timeouts. Every attempt has its own
request id on the wire, so that late deltas of an earlier worker cannot get into the answer.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Self

from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    NoWorkers,
    Overloaded,
    Refused,
    Unavailable,
    WorkerLost,
)
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import OnDeltas
from dynamo_lite.request_plane.client import MakeTransport
from dynamo_lite.request_plane.migrating_request import MigratingRequest, MigrationPlan
from dynamo_lite.routing.pickers import Picker, Selection
from dynamo_lite.runtime.tasks import OwnedTasks, all_of

logger = logging.getLogger(__name__)

#: Longest request id in characters. An attempt's id on the wire is a little longer.
MAX_REQUEST_ID = 240
#: Losses of a worker that a request survives. Few, because the request itself may be what kills its
#: workers.
MAX_MOVES = 3
#: Pauses between two rounds over the workers; each is twice the one before.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0

#: Takes the id of a request that gets no further delta, and the error that ended it.
OnEnded = Callable[[str, DynamoLiteError], None]


@dataclass
class FailoverStats:
    """Counts since the start."""

    #: Migrations by kind: "fresh" (the request had no token yet), "continue", "replay".
    moved: Counter[str] = field(default_factory=Counter[str])
    #: Requests that ended with WorkerLost.
    lost: int = 0
    #: Requests that ended by their timeout.
    expired: int = 0


class FailoverClient:
    """Async context manager; leaving it drops the running requests, without `on_ended`.

    make_transport: makes the connections to the workers, which live as long as this context.
    on_deltas: takes deltas under the requests' own ids.
    on_ended: see OnEnded; it may call `abort`.
    move_wait_s: how long a request that lost its worker waits for another one.
    """

    def __init__(
        self,
        make_transport: MakeTransport,
        *,
        picker: Picker,
        on_deltas: OnDeltas,
        on_ended: OnEnded,
        move_wait_s: float = 15.0,
    ):
        self.stats = FailoverStats()
        self.transport = make_transport(self.take_deltas, self.take_lost)
        self._on_deltas = on_deltas
        self._on_ended = on_ended
        #: The workers that may be picked.
        self.members: Sequence[EndpointRecord] = ()
        self._members_changed = asyncio.Event()
        self._picker = picker
        self._move_wait_s = move_wait_s
        self._flights: dict[str, MigratingRequest] = {}
        #: The requests that were submitted to a worker, by the id of their attempt.
        self._attempts: dict[str, MigratingRequest] = {}
        self._numbers = count(1)
        self._tasks = OwnedTasks()
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"<FailoverClient requests={len(self._flights)} attempts={len(self._attempts)}"
            f" tasks={len(self._tasks)}>"
        )

    @property
    def in_flight(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._flights)

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        try:
            for flight in list(self._flights.values()):
                self._forget(flight)
            await self._tasks.end()
        finally:
            await self.transport.__aexit__()

    def set_members(self, members: Sequence[EndpointRecord]) -> None:
        """A worker has joined, left, or is healthy again: requests that wait for one try again."""
        self.members = members
        self._members_changed.set()
        self._members_changed = asyncio.Event()

    async def submit(self, request: GenerateRequest, *, movable: MigrationPlan) -> None:
        """Returns when a worker has accepted the request, or when it was aborted meanwhile.

        After that it ends in exactly one way: a delta with a finish_reason, `abort`, or
        `on_ended` with WorkerLost or DeadlineExceeded. Raises Refused, NoWorkers,
        Overloaded, another Unavailable, or DeadlineExceeded (a worker did not
        reply, or `timeout_s` has passed); then the request runs on no worker.
        """
        self._check(request)
        loop = asyncio.get_running_loop()
        deadline = None if request.timeout_s is None else loop.time() + request.timeout_s
        flight = self._flights[request.request_id] = MigratingRequest(request, movable, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                await self._place(flight)
        except TimeoutError as exc:
            if not flight.over:
                self.stats.expired += 1
                self._drop(flight)
                raise _expired(request) from exc
        except BaseException:
            self._drop(flight)
            raise
        if self._closed:
            raise Unavailable("the client is closed")
        if deadline is not None and not flight.over:
            flight.timer = loop.call_at(deadline, lambda: self._end(flight, _expired(request)))

    def _check(self, request: GenerateRequest) -> None:
        request_id = request.request_id
        if self._closed:
            raise Unavailable("the client is closed")
        if request_id in self._flights:
            raise Refused(f"request {request_id} is already running", elsewhere=False)
        if len(request_id) > MAX_REQUEST_ID:
            raise Refused(f"a request id has at most {MAX_REQUEST_ID} characters", elsewhere=False)
        if request.timeout_s is not None and not request.timeout_s > 0:
            self.stats.expired += 1
            raise _expired(request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cancels requests; no delta of them follows. Unknown and ended ids are ignored."""
        running: list[str] = []
        for request_id in request_ids:
            if (flight := self._flights.get(request_id)) is not None:
                running += [flight.wire_id] if flight.wire_id else []
                self._forget(flight)
        if running:
            await self.transport.abort(running)

    # The choice of a worker

    async def _place(self, flight: MigratingRequest) -> None:
        """Returns when a worker has accepted it, or it has ended. An attempt that was accepted and
        lost before its `submit` has returned is placed by `_migrate`; then this only returns.

        Raises the error of the last round: Refused, NoWorkers, Overloaded, another
        Unavailable, or DeadlineExceeded.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + (self._move_wait_s if flight.moves else 0.0)
        pause_s = _FIRST_PAUSE_S
        while True:
            changed = self._members_changed
            if (failure := await self._try_members(flight)) is None:
                return
            left_s = until - loop.time()
            if left_s <= 0:
                raise failure
            await all_of(
                [changed], left_s if isinstance(failure, NoWorkers) else min(left_s, pause_s)
            )
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _try_members(self, flight: MigratingRequest) -> DynamoLiteError | None:
        """Submits to each live member at most once. Returns None when a worker has accepted it, or
        when it has ended meanwhile; else why none has accepted it.

        Raises Refused when no worker can accept the request.
        """
        tried: set[int] = set()
        failure: DynamoLiteError | None = None
        busy: list[Refused] = []
        while (picked := await self._choose(flight, tried)) is not None:
            tried.add(picked.member.lease_id)
            try:
                await self._send(flight, picked.member)
            except Refused as exc:
                if not exc.elsewhere and not flight.over:
                    raise
                busy += [exc] if exc.busy else []
                failure = Unavailable(exc.reason)
            except (Unavailable, DeadlineExceeded) as exc:
                failure = exc
            else:
                return None
            self._picker.released(flight.request_id)
            logger.info(
                "request %s: worker %x (%s) did not accept it: %s",
                flight.request_id,
                picked.member.lease_id,
                picked.reason,
                failure,
            )
        if flight.over:
            return None
        if busy:
            return Overloaded(f"every worker is at its limit: {busy[-1].reason}")
        return failure or NoWorkers("no live worker")

    async def _choose(self, flight: MigratingRequest, tried: set[int]) -> Selection | None:
        """Chooses a worker that was not tried yet; the one that it has just lost only if there is
        no other. None: all were tried, or it has ended meanwhile."""
        members = self.members
        left = {member.lease_id for member in members} - tried
        if flight.over or not left:
            return None
        without = tried if left == {flight.avoid} else tried | {flight.avoid}
        picked = self._picker.pick(members, flight.request, without)
        if not isinstance(picked, Selection):
            picked = await picked
        if flight.over:
            self._picker.released(flight.request_id)
            return None
        logger.debug(
            "request %s: selected worker %x: %s",
            flight.request_id,
            picked.member.lease_id,
            picked.reason,
        )
        return picked

    async def _send(self, flight: MigratingRequest, member: EndpointRecord) -> None:
        """Submits it to one worker, under a request id that no other attempt has or had."""
        # Numbered over all requests: a caller may reuse a request id while deltas of the earlier
        # request are still on their way.
        wire_id = f"{flight.request_id}~{next(self._numbers)}"
        request = flight.attempt(wire_id, member, asyncio.get_running_loop().time())
        self._attempts[wire_id] = flight
        try:
            await self.transport.submit(member, request)
        except BaseException:
            if self._attempts.pop(wire_id, None) is flight:
                flight.wire_id = ""
            raise
        if self._attempts.get(wire_id) is not flight:  # aborted, perhaps before it was sent
            await self.transport.abort([wire_id])

    # The transport's callbacks

    def take_deltas(self, deltas: list[TokenDelta]) -> None:
        taken: list[TokenDelta] = []
        ended: list[tuple[MigratingRequest, DynamoLiteError]] = []
        for delta in deltas:
            flight = self._attempts.get(delta.request_id)
            if flight is None:
                continue
            try:
                mine = flight.take(delta)
            except WorkerLost as exc:
                ended.append((flight, exc))
                continue
            if mine is not None:
                taken.append(mine)
            if delta.prefill is not None:
                self._picker.answered(flight.request_id)
            if delta.finish_reason is not None:
                self._forget(flight)
        if taken:
            self._on_deltas(taken)
        for flight, error in ended:
            self._end(flight, error)

    def take_lost(self, request_ids: Sequence[str], why: str) -> None:
        for wire_id in request_ids:
            flight = self._attempts.pop(wire_id, None)
            if flight is not None:
                flight.wire_id = ""
                self._lose(flight, why)

    # Migration

    def _lose(self, flight: MigratingRequest, why: str) -> None:
        """The worker of the request is lost: migrates the request or ends it."""
        gone = f"the worker that ran this request is gone ({why})"
        if flight.bound:
            self._end(flight, WorkerLost(f"{gone}; it cannot be migrated: {flight.bound}"))
        elif flight.moves >= MAX_MOVES:
            times = flight.moves
            self._end(flight, WorkerLost(f"{gone}; it has been migrated {times} times already"))
        else:
            flight.moves += 1
            flight.avoid = flight.lease_id
            self.stats.moved[flight.move_kind] += 1
            logger.info(
                "request %s: worker lost: %s; migrating it (%s)",
                flight.request_id,
                why,
                flight.move_kind,
            )
            name = f"migrate {flight.request_id}"
            flight.migration = self._tasks.start(self._migrate(flight, gone), name=name)

    async def _migrate(self, flight: MigratingRequest, gone: str) -> None:
        try:
            await self._place(flight)
        except DynamoLiteError as exc:
            self._end(flight, WorkerLost(f"{gone}; no other worker accepted it: {exc}"))
        except Exception:
            logger.exception("request %s: migration failed", flight.request_id)
            self._end(flight, WorkerLost(f"{gone}; it could not be migrated"))

    # Ends

    def _end(self, flight: MigratingRequest, error: DynamoLiteError) -> None:
        """Ends a request with an error: aborts it at its worker and calls `on_ended`."""
        if flight.over:
            return
        if isinstance(error, DeadlineExceeded):
            self.stats.expired += 1
        else:
            self.stats.lost += 1
            logger.warning("request %s: %s", flight.request_id, error)
        self._drop(flight)
        self._on_ended(flight.request_id, error)

    def _drop(self, flight: MigratingRequest) -> None:
        """Forgets the request, and aborts it at its worker if it may run there."""
        wire_id = flight.wire_id
        self._forget(flight)
        if wire_id:
            self._tasks.start(self.transport.abort([wire_id]), name=f"abort {wire_id}")

    def _forget(self, flight: MigratingRequest) -> None:
        """Ends the request's attempt, timer and migration."""
        if flight.over:
            return
        flight.over = True
        del self._flights[flight.request_id]
        self._picker.released(flight.request_id)
        self._attempts.pop(flight.wire_id, None)
        flight.wire_id = ""
        if flight.timer is not None:
            flight.timer.cancel()
        if flight.migration is not None and flight.migration is not asyncio.current_task():
            flight.migration.cancel()


def _expired(request: GenerateRequest) -> DeadlineExceeded:
    return DeadlineExceeded(f"request {request.request_id}", request.timeout_s or 0.0)

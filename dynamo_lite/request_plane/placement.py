"""Submits a request to one worker after another until one accepts it or its time is up."""

import asyncio
import logging
from collections.abc import Callable, Sequence, Set

from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    NoWorkers,
    Overloaded,
    Refused,
    Unavailable,
)
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.migrating_request import MigratingRequest
from dynamo_lite.routing.pickers import Picker, Selection
from dynamo_lite.runtime.tasks import all_of

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0


class Placement:
    """Submits requests to workers.

    move_wait_s: how long a request that lost its worker waits for another one.
    """

    def __init__(
        self,
        transport: RemoteGenerateClient,
        members: Callable[[], Sequence[EndpointRecord]],
        picker: Picker,
        *,
        move_wait_s: float,
    ):
        #: The requests that were submitted, by the id of their attempt.
        self.attempts: dict[str, MigratingRequest] = {}
        self._transport = transport
        self._members = members
        self._picker = picker
        self._move_wait_s = move_wait_s
        self._sends = 0

    async def place(self, flight: MigratingRequest) -> None:
        """Returns when a worker has accepted it, it has ended, or another call migrates it.

        Raises the error of the last round: Refused, NoWorkers, Overloaded, another
        Unavailable, or DeadlineExceeded.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + (self._move_wait_s if flight.moves else 0.0)
        pause_s = _FIRST_PAUSE_S
        turn = flight.moves
        while flight.is_at(turn):
            flight.wake.clear()
            failure = await self._try_members(flight, turn)
            if failure is None:
                return
            left_s = until - loop.time()
            if left_s <= 0:
                raise failure
            # `wake` is set when a worker is back; other causes need a retry.
            is_woken = isinstance(failure, NoWorkers)
            await all_of([flight.wake], left_s if is_woken else min(left_s, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _try_members(self, flight: MigratingRequest, turn: int) -> DynamoLiteError | None:
        """Submits to each live member at most once. Returns None when a worker has accepted it, or
        when it has ended or was migrated meanwhile; else why none has accepted it.

        Raises Refused when no worker can accept the request.
        """
        tried: set[int] = set()
        failure: DynamoLiteError | None = None
        busy: list[Refused] = []
        while flight.is_at(turn):
            picked = await self._choose(flight, turn, tried)
            if picked is None:
                break
            tried.add(picked.member.lease_id)
            try:
                await self._send(flight, picked.member)
            except Refused as exc:
                if not exc.elsewhere and flight.is_at(turn):
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
        if not flight.is_at(turn):
            return None
        if busy:
            return Overloaded(f"every worker is at its limit: {busy[-1].reason}")
        return failure or NoWorkers("no live worker")

    async def _choose(
        self, flight: MigratingRequest, turn: int, tried: set[int]
    ) -> Selection | None:
        """Chooses a worker that was not tried yet; the one that it has just lost only if there is
        no other. None: all were tried, or it has ended or was migrated meanwhile."""
        members = self._members()
        without = tried if flight.avoid is None else tried | {flight.avoid}
        if not _any_besides(without, members):
            without = tried
            if not _any_besides(without, members):
                return None
        picked = self._picker.pick(members, flight.request, without)
        if not isinstance(picked, Selection):
            picked = await picked
        if not flight.is_at(turn):
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
        wire_id = self._wire_id(flight)
        request = flight.attempt(wire_id, member, asyncio.get_running_loop().time())
        self.attempts[wire_id] = flight
        try:
            await self._transport.submit(member, request)
        except BaseException:
            if self.attempts.pop(wire_id, None) is flight:
                flight.wire_id = ""
            raise

    def _wire_id(self, flight: MigratingRequest) -> str:
        """Numbered over all requests: a caller may reuse a request id while deltas of the earlier
        request are still on their way."""
        self._sends += 1
        return f"{flight.request_id}~{self._sends}"


def _any_besides(without: Set[int], members: Sequence[EndpointRecord]) -> bool:
    return any(member.lease_id not in without for member in members)

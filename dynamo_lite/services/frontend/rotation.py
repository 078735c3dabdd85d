"""Decode workers out of rotation: how long their requests wait for them.

An unresponsive worker is given nothing new while another one responds
(`HealthMonitor.members_or_all`). What runs there stays for a while, since moving
costs the prompt's computation again; then it moves. Where nobody responds there
is nowhere to go, and it stays.
"""

import asyncio
from collections.abc import Callable

from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane import GenerateClient
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster

#: How long a worker may be unresponsive before its requests move.
MOVE_AFTER_S = 10.0
#: A rest so short may be lost in its sum with the time: a timer for it would ring again and again.
_ROUNDING_S = 1e-6


class Rotation:
    """Context manager that tells the transport whom to keep and whom to drop.

    changed: called when somebody may be picked who could not be before, or reverse.
    """

    def __init__(
        self,
        roster: Roster,
        health: HealthMonitor,
        transport: GenerateClient,
        changed: Callable[[], None],
    ):
        self._roster, self._health = roster, health
        self._transport, self._changed = transport, changed
        self._timer: asyncio.TimerHandle | None = None
        self._open = False

    def __enter__(self) -> None:
        self._open = True
        self._roster.on_change(self._on_roster)
        self._health.on_change(self._on_health)
        self._look()

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._disarm()

    def _on_roster(self, joined: frozenset[int], left: frozenset[int]) -> None:
        if self._open:
            self._transport.retain(self._roster.members)
            self._changed()
            self._look()

    def _on_health(self, back: frozenset[int], lost: frozenset[int]) -> None:
        if self._open:
            self._changed()
            self._look()

    def _look(self) -> None:
        """Moves what has waited long enough; one timer for the next."""
        self._disarm()
        responsive = {member.lease_id for member in self._health.responsive}
        if not responsive:
            return
        waits = [self._move(m) for m in self._roster.members if m.lease_id not in responsive]
        if waits:
            self._timer = asyncio.get_running_loop().call_later(min(waits), self._look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _move(self, member: EndpointRecord) -> float:
        """Returns in how many seconds to look at the member again."""
        left_s = MOVE_AFTER_S - self._health.silent_for(member.lease_id)
        if left_s > _ROUNDING_S:
            return left_s
        self._transport.drop(member, self._health.trouble(member.lease_id))
        # It may get others, when nobody responds for a while.
        return MOVE_AFTER_S

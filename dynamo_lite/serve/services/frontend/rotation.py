"""Migrates requests away from decode workers that are unresponsive for too long.

An unresponsive worker gets no new requests while another one is responsive
(`HealthMonitor.members_or_all`). Its running requests wait for `MIGRATE_AFTER_S`, because
a migration computes the prompt again. While no worker is responsive they stay.
"""

import asyncio
from collections.abc import Callable

from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster

#: How long a worker may be unresponsive before its requests migrate.
MIGRATE_AFTER_S = 10.0
#: Below this, `now + delay == now` in floating point and the timer would fire in a loop.
_ROUNDING_S = 1e-6


class Rotation:
    """Context manager: updates the transport's workers from the roster and their health.

    changed: called when the set of workers for new requests changes.
    """

    def __init__(
        self,
        roster: Roster,
        health: HealthMonitor,
        transport: RemoteGenerateClient,
        changed: Callable[[], None],
    ):
        self._roster, self._health = roster, health
        self._transport, self._changed = transport, changed
        self._timer: asyncio.TimerHandle | None = None
        self._open = False

    def __enter__(self) -> None:
        self._open = True
        self._transport.retain(self._roster.members)
        self._roster.on_change(self._on_roster)
        self._health.on_change(self._on_health)
        self._migrate_overdue()

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._disarm()

    def _on_roster(self, joined: frozenset[int], left: frozenset[int]) -> None:
        if self._open:
            self._transport.retain(self._roster.members)
            self._changed()
            self._migrate_overdue()

    def _on_health(self, back: frozenset[int], lost: frozenset[int]) -> None:
        if self._open:
            self._changed()
            self._migrate_overdue()

    def _migrate_overdue(self) -> None:
        """Migrates requests of workers past the limit; sets one timer for the next worker."""
        self._disarm()
        responsive = {member.lease_id for member in self._health.responsive}
        if not responsive:
            return
        waits = [
            self._migrate_if_due(m) for m in self._roster.members if m.lease_id not in responsive
        ]
        if waits:
            self._timer = asyncio.get_running_loop().call_later(min(waits), self._migrate_overdue)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _migrate_if_due(self, member: EndpointRecord) -> float:
        """Returns the seconds until the member must be checked again."""
        left_s = MIGRATE_AFTER_S - self._health.silent_for(member.lease_id)
        if left_s > _ROUNDING_S:
            return left_s
        self._transport.drop(member, self._health.trouble(member.lease_id))
        # It may get requests again while no worker is responsive.
        return MIGRATE_AFTER_S

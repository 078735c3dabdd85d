"""Which of a roster's members are healthy, by their heartbeats (`heartbeat.py`).

A registered member may be unable to work: stopped, stuck, or with an engine that does not
reply. Missing or bad heartbeats show this long before its lease expires, and new ones show
when it is healthy again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Gauge

from dynamo_lite.protocol import names
from dynamo_lite.protocol.health import Heartbeat, decode_heartbeat
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.listeners import Listeners
from dynamo_lite.runtime.members.roster import Members, Roster
from dynamo_lite.runtime.messaging import Messaging

logger = logging.getLogger(__name__)

#: A member without a heartbeat for this long is unhealthy.
SILENT_S = 4.0
#: After a delay of this process none is marked for this long: heartbeats in its own buffers are
#: read in this time.
SECOND_LOOK_S = 1.0
#: How often missing heartbeats are looked for.
_LOOK_S = 0.2

#: Takes the lease ids that have become healthy, and those that have become unhealthy.
OnHealth = Callable[[frozenset[int], frozenset[int]], None]


@dataclass
class MemberHealth:
    """One member, as its heartbeats show it. `HealthMonitor` writes what the methods do not."""

    #: When it was last known to be healthy, or when its timeout began.
    well_at: float
    #: Number of the newest heartbeat.
    number: int = -1
    #: The content of the newest heartbeat.
    ok: bool = True
    detail: str = ""
    #: Whether heartbeats are missing.
    silent: bool = False

    @property
    def responsive(self) -> bool:
        return self.ok and not self.silent

    @property
    def trouble(self) -> str:
        """What is wrong; empty when only heartbeats are missing, or nothing."""
        return "" if self.ok else self.detail or "it cannot work"

    def take(self, heartbeat: Heartbeat) -> None:
        """It is the newest one."""
        self.number, self.ok, self.detail = heartbeat.number, heartbeat.ok, heartbeat.detail


class HealthMonitor:
    """Async context manager: which of a roster's members are healthy. The roster must be open.

    The timeout of a member starts at its last good heartbeat, at its joining or at this process's
    last reconnect, whichever is latest. It does not run while this process is disconnected.
    """

    def __init__(
        self,
        messaging: Messaging,
        roster: Roster,
        *,
        namespace: str,
        component: str,
        registry: CollectorRegistry | None = None,
        on_drop: OnDrop = uncounted,
    ):
        self._messaging, self._roster, self._on_drop = messaging, roster, on_drop
        self._subject = names.health_subject(namespace, component)
        self._members: dict[int, MemberHealth] = {}
        #: The roster's members, and the healthy ones of them as long as nothing changes.
        self._known: tuple[Members, Members] | None = None
        self._listeners = Listeners[frozenset[int], frozenset[int]](self._subject)
        self._timer: asyncio.TimerHandle | None = None
        #: No member is marked as silent before.
        self._trusted_until = 0.0
        self._stack = contextlib.AsyncExitStack()
        if registry is not None:
            Gauge(
                "dynamo_lite_workers_unresponsive",
                "Members that are registered, but silent or unable to work",
                registry=registry,
            ).set_function(lambda: len(roster.members) - len(self.responsive))

    def __repr__(self) -> str:
        unwell = sorted(f"{i:x}" for i, m in self._members.items() if not m.responsive)
        return f"HealthMonitor({self._subject!r}, unresponsive={unwell})"

    @property
    def responsive(self) -> Members:
        """The healthy members, sorted by key; the same tuple until any of them changes."""
        members = self._roster.members
        if self._known is None or self._known[0] is not members:
            self._known = members, tuple(m for m in members if self._responds(m.lease_id))
        return self._known[1]

    @property
    def members_or_all(self) -> Members:
        """The healthy members; if there are none, all."""
        return self.responsive or self._roster.members

    def trouble(self, lease_id: int) -> str:
        """Why a member is unhealthy; empty when it is healthy."""
        member = self._members.get(lease_id)
        if member is None or member.responsive:
            return ""
        return member.trouble or f"no heartbeat for {self.silent_for(lease_id):.1f} s"

    @property
    def receives_heartbeats(self) -> bool:
        """False while this process is disconnected from the broker."""
        return self._messaging.connected

    def is_known_unwell(self, lease_id: int) -> bool:
        """Whether its last heartbeat reports it as unhealthy; missing ones do not."""
        member = self._members.get(lease_id)
        return member is not None and not member.ok

    def silent_for(self, lease_id: int) -> float:
        """Seconds since the member was last known to be healthy; 0 if it is no member."""
        member = self._members.get(lease_id)
        return 0.0 if member is None else self._now() - member.well_at

    def shows_life(self, lease_id: int) -> None:
        """The member has sent another message: it is alive, but perhaps not healthy."""
        self._update(lease_id, None)

    def on_change(self, callback: OnHealth) -> contextlib.AbstractContextManager[object]:
        """Calls `callback` in the event loop when members become healthy or unhealthy, until the
        returned context is left. Joins and leaves are reported by the roster only."""
        return self._listeners.add(callback)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self._look(self._now())
            stack.callback(self._stop_looking)
            stack.enter_context(self._roster.on_change(self._on_roster))
            self._on_roster(frozenset(m.lease_id for m in self._roster.members), frozenset())
            stack.enter_context(self._messaging.watch_connection(self._on_connection))
            on_heartbeat = counted(self._on_heartbeat, "beat", self._on_drop)
            await stack.enter_async_context(self._messaging.serve(self._subject, on_heartbeat))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _responds(self, lease_id: int) -> bool:
        """A member that has just joined counts as healthy."""
        member = self._members.get(lease_id)
        return member is None or member.responsive

    # Heartbeats

    async def _on_heartbeat(self, payload: bytes) -> None:
        heartbeat = decode_heartbeat(payload)
        member = self._members.get(heartbeat.lease_id)
        if member is not None and heartbeat.number > member.number:
            self._update(heartbeat.lease_id, heartbeat)

    def _update(self, lease_id: int, heartbeat: Heartbeat | None) -> None:
        member = self._members.get(lease_id)
        if member is None:
            return
        before = member.responsive
        member.silent = False
        if heartbeat is not None:
            member.take(heartbeat)
        if member.responsive != before:
            self._known = None
        if member.ok:
            member.well_at = self._now()
        if member.responsive and not before:
            logger.info("worker %x is healthy again", lease_id)
            self._listeners.notify(frozenset({lease_id}), frozenset())
        elif before and not member.responsive:
            logger.warning("worker %x is unhealthy: %s", lease_id, self.trouble(lease_id))
            self._listeners.notify(frozenset(), frozenset({lease_id}))

    def _on_roster(self, joined: frozenset[int], left: frozenset[int]) -> None:
        self._known = None
        for lease_id in left:
            self._members.pop(lease_id, None)
        for lease_id in joined:
            self._members[lease_id] = MemberHealth(self._now())

    def _on_connection(self, connected: bool) -> None:
        if connected:
            for member in self._members.values():
                member.well_at = self._now()

    # Missing heartbeats

    def _look(self, due: float) -> None:
        """Marks the members that are silent."""
        now = self._now()
        self._timer = asyncio.get_running_loop().call_at(now + _LOOK_S, self._look, now + _LOOK_S)
        if now > due + SECOND_LOOK_S / 2:
            self._trusted_until = now + SECOND_LOOK_S
        if not self._messaging.connected or now < self._trusted_until:
            return
        silent = frozenset(
            i for i, m in self._members.items() if m.responsive and now - m.well_at >= SILENT_S
        )
        if not silent:
            return
        for lease_id in silent:
            self._members[lease_id].silent = True
        self._known = None  # after that: other threads read `responsive`
        for lease_id in silent:
            logger.warning("worker %x is unhealthy: %s", lease_id, self.trouble(lease_id))
        self._listeners.notify(frozenset(), silent)

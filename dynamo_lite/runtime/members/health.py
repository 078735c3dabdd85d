"""Heartbeats, and which of a roster's members are healthy by them.

A registered member may be unable to work: stopped, stuck, or with an engine that does not
reply. Missing or bad heartbeats show this long before its lease expires, and new ones show
when it is healthy again.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Gauge

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.health import Heartbeat, decode_heartbeat
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.listeners import Listeners
from dynamo_lite.runtime.members.roster import Members, Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import running

logger = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 1.0
#: A member without a heartbeat for this long is unhealthy.
SILENT_S = 4.0
#: After a delay of this process none is marked for this long: heartbeats in its own buffers are
#: read in this time.
SECOND_LOOK_S = 1.0
#: How often missing heartbeats are looked for.
_LOOK_S = 0.2

#: Whether a worker is healthy, and what is wrong if it is not.
HealthVerdict = tuple[bool, str]
#: Takes the lease ids that have become healthy, and those that have become unhealthy.
OnHealth = Callable[[frozenset[int], frozenset[int]], None]


async def publish_heartbeats(
    messaging: Messaging,
    *,
    namespace: str,
    component: str,
    lease_id: int,
    verdict: Callable[[], HealthVerdict],
) -> None:
    """Publishes one worker's heartbeats until it is cancelled. From then on only the worker's
    registration counts."""
    subject = names.health_subject(namespace, component)
    for number in itertools.count():
        ok, detail = verdict()
        heartbeat = Heartbeat(lease_id=lease_id, number=number, ok=ok, detail=detail[:512])
        # Without a broker no process expects heartbeats.
        with contextlib.suppress(Unavailable):
            await messaging.publish(subject, encode(heartbeat))
        await asyncio.sleep(HEARTBEAT_PERIOD_S)


@dataclass
class _Member:
    #: When it was last known to be healthy, or when its timeout began.
    well_at: float
    #: The newest one.
    heartbeat: Heartbeat
    #: Whether heartbeats are missing.
    silent: bool = False

    @property
    def responsive(self) -> bool:
        return self.heartbeat.ok and not self.silent


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
        self._members: dict[int, _Member] = {}
        #: The roster's members, and the healthy ones of them as long as nothing changes.
        self._known: tuple[Members, Members] | None = None
        self._listeners = Listeners[frozenset[int], frozenset[int]](self._subject)
        self._stack = contextlib.AsyncExitStack()
        if registry is not None:
            Gauge(
                "dynamo_lite_workers_unresponsive",
                "Members that are registered, but silent or unable to work",
                registry=registry,
            ).set_function(lambda: len(roster.members) - len(self.responsive))

    @property
    def responsive(self) -> Members:
        """The healthy members, sorted by key; the same tuple until any of them changes."""
        members = self._roster.members
        if self._known is None or self._known[0] is not members:
            self._known = members, tuple(m for m in members if self._responds(m.lease_id))
        return self._known[1]

    def trouble(self, lease_id: int) -> str:
        """Why a worker is no healthy member; empty when it is one."""
        if (member := self._members.get(lease_id)) is None:
            return "it is not registered"
        if member.responsive:
            return ""
        if member.heartbeat.ok:
            return f"no heartbeat for {self.silent_for(lease_id):.1f} s"
        return member.heartbeat.detail or "it cannot work"

    @property
    def receives_heartbeats(self) -> bool:
        """False while this process is disconnected from the broker."""
        return self._messaging.connected

    def is_known_unwell(self, lease_id: int) -> bool:
        """Whether its last heartbeat reports it as unhealthy; missing ones do not."""
        member = self._members.get(lease_id)
        return member is not None and not member.heartbeat.ok

    def silent_for(self, lease_id: int) -> float:
        """Seconds since the member was last known to be healthy; 0 if it is no member."""
        member = self._members.get(lease_id)
        return 0.0 if member is None else self._now() - member.well_at

    def shows_life(self, lease_id: int, heartbeat: Heartbeat | None = None) -> None:
        """The member has sent its newest heartbeat, or another message: then it is alive, but
        perhaps not healthy."""
        if (member := self._members.get(lease_id)) is None:
            return
        before, member.silent = member.responsive, False
        if heartbeat is not None:
            member.heartbeat = heartbeat
        if member.heartbeat.ok:
            member.well_at = self._now()
        if member.responsive != before:
            self._changed(frozenset({lease_id}), member.responsive)

    def on_change(self, callback: OnHealth) -> contextlib.AbstractContextManager[object]:
        """Calls `callback` in the event loop when members become healthy or unhealthy, until the
        returned context is left. Joins and leaves are reported by the roster only."""
        return self._listeners.add(callback)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(running(self._look(), name="missing heartbeats"))
            stack.enter_context(self._roster.on_change(self._on_roster))
            self._on_roster(frozenset(m.lease_id for m in self._roster.members), frozenset())
            stack.enter_context(self._messaging.watch_connection(self._on_connection))
            on_heartbeat = counted(self._on_heartbeat, "beat", self._on_drop)
            await stack.enter_async_context(self._messaging.serve(self._subject, on_heartbeat))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

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
        if member is not None and heartbeat.number > member.heartbeat.number:
            self.shows_life(heartbeat.lease_id, heartbeat)

    def _changed(self, lease_ids: frozenset[int], well: bool) -> None:
        self._known = None  # other threads read `responsive`
        for lease_id in lease_ids:
            if well:
                logger.info("worker %x is healthy again", lease_id)
            else:
                logger.warning("worker %x is unhealthy: %s", lease_id, self.trouble(lease_id))
        none = frozenset[int]()
        self._listeners.notify(*((lease_ids, none) if well else (none, lease_ids)))

    def _on_roster(self, joined: frozenset[int], left: frozenset[int]) -> None:
        self._known = None
        for lease_id in left:
            self._members.pop(lease_id, None)
        for lease_id in joined:
            none_yet = Heartbeat(lease_id=lease_id, number=-1, ok=True)
            self._members[lease_id] = _Member(self._now(), none_yet)

    def _on_connection(self, connected: bool) -> None:
        if connected:
            for member in self._members.values():
                member.well_at = self._now()

    # Missing heartbeats

    async def _look(self) -> None:
        """Marks the members that are silent."""
        trusted_from = due = self._now()
        while True:
            if (now := self._now()) > due + SECOND_LOOK_S / 2:
                trusted_from = now + SECOND_LOOK_S
            if self._messaging.connected and now >= trusted_from:
                self._mark(now)
            due = now + _LOOK_S
            await asyncio.sleep(_LOOK_S)

    def _mark(self, now: float) -> None:
        silent = frozenset(
            i for i, m in self._members.items() if m.responsive and now - m.well_at >= SILENT_S
        )
        for lease_id in silent:
            self._members[lease_id].silent = True
        if silent:
            self._changed(silent, False)

"""Who of a roster's members responds, by their health beats (`beat.py`).

A member that is registered may still be unable to work: stopped, stuck, or with
an engine that does not answer. Its beats tell long before its lease ends, and
tell again when it is back.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.health import Heartbeat, decode_heartbeat
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.listeners import Listeners
from dynamo_lite.runtime.members.member_health import MemberHealth
from dynamo_lite.runtime.members.roster import Members, Roster
from dynamo_lite.runtime.messaging import Messaging

logger = logging.getLogger(__name__)

#: A member without a beat for this long is suspected ...
SILENT_S = 3.0
#: ... and judged so much later. It may be we who were held up, or whose connection
#: has just broken: what waits in our own buffers, or that news, comes first.
SECOND_LOOK_S = 1.0

#: Takes the lease ids that respond again, and those that do no longer.
OnHealth = Callable[[frozenset[int], frozenset[int]], None]


class HealthMonitor:
    """Async context manager: which of a roster's members respond. The roster must be open.

    Silence counts from the last good beat, from the member's joining or from our
    own last reconnect, whichever is latest, and not while we are disconnected.
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
        self._listeners = Listeners[frozenset[int], frozenset[int]](self._subject)
        self._timer: asyncio.TimerHandle | None = None
        self._stack = contextlib.AsyncExitStack()
        self._open = False
        self._dropped: Counter | None = None
        if registry is not None:
            self._dropped = Counter(
                "dynamo_lite_beats_dropped",
                "Health beats that were not heeded, by why",
                ["reason"],
                registry=registry,
            )
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
        """Those that can be expected to answer; sorted by key."""
        return tuple(m for m in self._roster.members if self._responds(m.lease_id))

    @property
    def members_or_all(self) -> Members:
        """For who would rather try a suspect than give up."""
        return self.responsive or self._roster.members

    def is_responsive(self, lease_id: int) -> bool:
        """False also for whom the roster does not have."""
        return self._roster.get(lease_id) is not None and self._responds(lease_id)

    def trouble(self, lease_id: int) -> str:
        """What keeps an unresponsive member from work; empty when it responds."""
        member = self._members.get(lease_id)
        if member is None or member.responsive:
            return ""
        return member.trouble or f"silent for {self.silent_for(lease_id):.1f} s"

    def silent_for(self, lease_id: int) -> float:
        """Seconds since the member was last known to be well; 0 for who is no member."""
        member = self._members.get(lease_id)
        return 0.0 if member is None else self._now() - member.well_at

    def shows_life(self, lease_id: int) -> None:
        """The member was heard otherwise: it is not silent, though perhaps not well."""
        self._heard(lease_id, None)

    def beats(self, lease_id: int) -> bool:
        """Whether the member's own beats are good, whatever canaries say."""
        member = self._members.get(lease_id)
        return member is not None and member.ok and not member.silent

    def mark_unhealthy(self, lease_id: int, why: str) -> None:
        """A canary failed there: it is unresponsive until `mark_healthy`, whatever it says."""
        if (member := self._members.get(lease_id)) is not None:
            before, member.failed = member.responsive, why
            self._weigh(lease_id, member, before)

    def mark_healthy(self, lease_id: int) -> None:
        """It has answered a request."""
        member = self._members.get(lease_id)
        if member is not None and member.failed:
            member.failed = ""
            self._weigh(lease_id, member, False)

    def on_change(self, callback: OnHealth) -> None:
        """Calls `callback` from the event loop after members turned; joins and leaves are
        the roster's to tell."""
        self._listeners.add(callback)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._close)
            self._open = True
            self._roster.on_change(self._on_roster)
            self._on_roster(frozenset(m.lease_id for m in self._roster.members), frozenset())
            stack.enter_context(self._messaging.watch_connection(self._on_connection))
            on_beat = counted(self._on_beat, "beat", self._on_drop)
            await stack.enter_async_context(self._messaging.serve(self._subject, on_beat))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _close(self) -> None:
        self._open = False
        self._disarm()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _responds(self, lease_id: int) -> bool:
        """Who has just joined, and is not known here yet, does."""
        member = self._members.get(lease_id)
        return member is None or member.responsive

    # What is heard

    async def _on_beat(self, payload: bytes) -> None:
        try:
            beat = decode_heartbeat(payload)
            if beat.wire_version != WIRE_VERSION:
                raise ProtocolError(f"wire version {beat.wire_version} is not spoken")
        except ProtocolError:
            self._drop("malformed")
            raise
        member = self._members.get(beat.lease_id)
        if member is None:
            self._drop("unknown")
        elif not member.is_news(beat.number):
            self._drop("late")
        else:
            self._heard(beat.lease_id, beat)

    def _drop(self, reason: str) -> None:
        if self._dropped is not None:
            self._dropped.labels(reason).inc()

    def _heard(self, lease_id: int, beat: Heartbeat | None) -> None:
        member = self._members.get(lease_id)
        if member is None:
            return
        before = member.responsive
        member.silent = False
        if beat is not None:
            member.number, member.ok, member.detail = beat.number, beat.ok, beat.detail
        self._weigh(lease_id, member, before)

    def _weigh(self, lease_id: int, member: MemberHealth, before: bool) -> None:
        """before: whether it responded, until now."""
        if member.well:
            member.well_at = self._now()
        if member.responsive and not before:
            logger.info("worker %x works again", lease_id)
            self._arm()
            self._listeners.notify(frozenset({lease_id}), frozenset())
        elif before and not member.responsive:
            logger.warning("worker %x cannot work: %s", lease_id, self.trouble(lease_id))
            self._listeners.notify(frozenset(), frozenset({lease_id}))

    def _on_roster(self, joined: frozenset[int], left: frozenset[int]) -> None:
        if not self._open:
            return
        for lease_id in left:
            self._members.pop(lease_id, None)
        for lease_id in joined:
            self._members[lease_id] = MemberHealth(self._now())
        self._arm()

    def _on_connection(self, connected: bool) -> None:
        self._disarm()
        if connected:
            for member in self._members.values():
                member.well_at = self._now()
            self._arm()

    # What is not heard: one timer, for the next member that may have fallen silent

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """A timer that runs is never too late: whoever is heard is due after all others."""
        if self._timer is not None or not self._messaging.connected:
            return
        well = [member.well_at for member in self._members.values() if member.responsive]
        if well:
            self._call(max(min(well) + SILENT_S, self._now()), self._suspect)

    def _call(self, due: float, what: Callable[[float], None]) -> None:
        self._timer = asyncio.get_running_loop().call_at(due, what, due)

    def _suspect(self, _due: float) -> None:
        self._timer = None
        if self._overdue(SILENT_S):
            self._call(self._now() + SECOND_LOOK_S, self._judge)
        else:
            self._arm()

    def _judge(self, due: float) -> None:
        """Those that are still silent a while after they were suspected."""
        self._timer = None
        if self._now() > due + SECOND_LOOK_S / 2:
            return self._suspect(due)  # we were held up: look again
        silent = self._overdue(SILENT_S + SECOND_LOOK_S)
        for lease_id in silent:
            self._members[lease_id].silent = True
            logger.warning("worker %x does not work: %s", lease_id, self.trouble(lease_id))
        self._arm()
        if silent:
            self._listeners.notify(frozenset(), silent)

    def _overdue(self, limit_s: float) -> frozenset[int]:
        # Added up as for the timer: rounded otherwise, it would fire again and again at its time.
        now = self._now()
        return frozenset(
            lease_id
            for lease_id, member in self._members.items()
            if member.responsive and member.well_at + limit_s <= now
        )

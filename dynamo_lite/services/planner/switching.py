"""Carries out the switch of a worker to another role to its end, also over a planner's death.

There is at most one, and one record in etcd, without a lease, written before the first order.
The connector's supervisor drains the one and starts the other; it says by the first one's lease how
far it is, so a leader that takes over repeats nothing.
"""

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import msgspec

from dynamo_lite.policy.scaling.inputs import Operation, SwitchHistory
from dynamo_lite.policy.scaling.switch_book import times_text
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import Refused, Unavailable, UnknownWorker
from dynamo_lite.protocol.planner import SwitchRecord, SwitchState
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.store import Store
from dynamo_lite.services.planner.authentic import AuthenticRecords
from dynamo_lite.services.planner.connector import (
    COMPONENTS,
    Connector,
    Counted,
    Order,
    SwitchingConnector,
)
from dynamo_lite.services.planner.stepping import (
    FAILED_STARTS,
    Stepped,
    enter,
    needs_new_id,
    resumable,
    step,
)
from dynamo_lite.services.planner.target import Target

logger = logging.getLogger(__name__)

#: Switches whose times are remembered.
_TIMES = 20

_Phase = Literal["ordered", "asked", "withdrawing", "ended"]


@dataclass
class _Running(Stepped[SwitchRecord]):
    #: Monotonic; when this process resumed it, if another one began it.
    began: float
    #: As it was seen last.
    state: SwitchState | None = None


class Switching:
    """connector: one that cannot switch has none under way. may_act, members, least: as of
    `Operations`. records: as of `Target`."""

    def __init__(
        self,
        store: Store,
        namespace: str,
        connector: Connector,
        target: Target,
        may_act: Callable[[], float],
        clock: Clock,
        members: Callable[[], Iterable[EndpointRecord]],
        least: Callable[[str], int] = lambda component: 0,
        records: AuthenticRecords | None = None,
    ):
        self._store, self._key = store, names.planner_switch_key(namespace)
        self._connector = connector if isinstance(connector, SwitchingConnector) else None
        self._target, self._may_act, self._clock = target, may_act, clock
        self._members, self._least = members, least
        self._records = records or AuthenticRecords()
        self._one: _Running | None = None
        self._drains: deque[float] = deque(maxlen=_TIMES)
        self._starts: deque[float] = deque(maxlen=_TIMES)
        #: How switches have ended: (component that gets the worker, "switch", outcome).
        self.ended: Counter[tuple[str, str, str]] = Counter()
        #: Leases that the connector does not know.
        self.foreign: set[int] = set()
        self._left: set[int] = set()
        #: The last switch, and since when this process knows of it, monotonic. The clocks of two
        #: hosts differ.
        self._last: tuple[int, float] | None = None

    def __len__(self) -> int:
        return 0 if self._one is None else 1

    def victims(self, live: Iterable[int]) -> set[int]:
        """Leases of workers that leave their role, or have left it and are still registered.

        live: the leases of all registered workers.
        """
        self._left &= set(live)
        return self._left | (set() if self._one is None else {self._one.record.lease_id})

    def seen(self, last: SwitchRecord | None) -> SwitchHistory | None:
        """What a decision needs. last: the record in etcd. None: the connector cannot switch."""
        if self._connector is None:
            return None
        known = SwitchHistory(
            drain_s=median(self._drains) if self._drains else None,
            start_s=median(self._starts) if self._starts else None,
        )
        if last is None:
            return known
        now = self._clock.monotonic()
        if self._last is None or self._last[0] != last.id:
            self._last = last.id, now
        giver = next((role for role, name in COMPONENTS.items() if name == last.component), None)
        return replace(known, last_giver=giver, last_age_s=now - self._last[1])

    def failed_starts(self, component: str) -> int:
        return sum(self.ended[component, "switch", outcome] for outcome in FAILED_STARTS)

    def of(self, component: str) -> tuple[Operation, ...]:
        """The switch as an operation of this component."""
        one = self._one
        if one is None or component not in (one.record.component, one.record.to):
            return ()
        record, took = one.record, component == one.record.to
        started_s = 0.0 if one.state is None else one.state.start_s
        return (
            Operation(
                id=record.id,
                kind="take" if took else "give",
                age_s=started_s if took else self._clock.monotonic() - one.began,
                confirmed=record.phase != "ordered",
                withdrawing=record.phase == "withdrawing",
            ),
        )

    async def load(self) -> None:
        """Takes over what another planner has left. Raises StoreUnavailable."""
        self._one = None
        value = await self._store.get(self._key)
        if value is None or self._connector is None:
            return
        record = await resumable(
            self._store, self._key, value, SwitchRecord, self._clock, self._records
        )
        if record is None:
            return
        if record.phase == "ended":
            self._left.add(record.lease_id)
            return
        self._one = _Running(record, began=self._clock.monotonic(), stored=True, known=True)
        logger.info("resumes %s", record)

    def forget(self) -> None:
        """Another planner leads."""
        self._one = None

    async def begin(self, to: str, worker: EndpointRecord, counted: Counted, reason: str) -> None:
        """Raises Unavailable or StoreUnavailable; no order was given then."""
        self._may_act()
        if self._one is not None:
            raise Unavailable("a switch is under way")
        giver = worker.component
        now = {name: one.starting + one.ready for name, one in counted.roles.items()}
        version = await self._target.next_version(
            counted.version, giver, max(now[giver] - 1, 0), reason, up=False
        )
        version = await self._target.next_version(version, to, now[to] + 1, reason, up=True)
        record = SwitchRecord(
            id=version,
            component=giver,
            to=to,
            lease_id=worker.lease_id,
            host=worker.host,
            phase="ordered",
            reason=reason[:1024],
            at=self._clock.wall(),
        )
        # Before its record is stored: a put that fails may have stored it.
        self._one = _Running(record, began=self._clock.monotonic())
        await self._step(self._one, counted)

    async def withdraw(self, operation: int) -> None:
        """Cancels the start of the other worker. Raises Unavailable or StoreUnavailable."""
        self._may_act()
        if self._one is not None and self._one.record.id == operation:
            await self._enter(self._one, "withdrawing")

    async def advance(self, counted: Counted) -> None:
        """Takes the switch as far as possible now. Raises Unavailable, when this process may not
        act, or StoreUnavailable."""
        one = self._one
        if one is not None and self._clock.monotonic() >= one.retry_at:
            await self._step(one, counted)

    async def _step(self, one: _Running, counted: Counted) -> None:
        async def work() -> None:
            if not one.stored:
                await self._enter(one, one.record.phase)
            await self._go_on(one, counted)

        async def refused(exc: Refused) -> None:
            logger.warning("%s: %s", what, exc)
            if isinstance(exc, UnknownWorker):
                self.foreign.add(one.record.lease_id)
            await self._end(one, "refused")

        what = f"switch of {one.record.lease_id:x}"
        act_s = self._may_act()
        await step(one, work, refused, within_s=act_s, clock=self._clock, what=what)

    async def _go_on(self, one: _Running, counted: Counted) -> None:
        record, connector = one.record, self._connector
        assert connector is not None
        one.state = _find(counted.switches, record)
        if one.state is not None and one.state.phase in ("done", "ended"):
            await self._settle(one, one.state)
            return
        match record.phase:
            case "ordered" if one.state is None:
                if why := self._too_few(record, counted):
                    raise Refused(why, elsewhere=False)
                await connector.switch(await self._order(record, counted))
                await self._enter(one, "asked")
            case "ordered":
                # It was ordered; the planner that did it died before it could say so.
                await self._enter(one, "asked")
            case "withdrawing" if one.state is not None:
                order = await self._order(record, counted)
                # One that has become ready meanwhile stays, and the next look shows it.
                with contextlib.suppress(Refused):
                    await connector.cancel_switch(order)
                    await self._end(one, "withdrawn")
            case _ if one.state is None:
                # The supervisor has been started again itself.
                await self._end(one, "failed")
            case _:
                pass

    async def _settle(self, one: _Running, state: SwitchState) -> None:
        if state.phase != "done":
            await self._end(one, "failed")
            return
        one.record = msgspec.structs.replace(one.record, took=times_text(state)[:1024])
        await self._end(one, "done")
        self._drains.append(state.drain_s)
        self._starts.append(state.start_s)

    def _too_few(self, record: SwitchRecord, counted: Counted) -> str:
        """Why its worker must stay; empty if it may go. Since the switch was decided, others may
        have gone."""
        if not {record.component, record.to} <= set(counted.roles):
            return "the graph has not both roles"
        others = sum(
            member.component == record.component and member.lease_id != record.lease_id
            for member in self._members()
        )
        if others < 1:
            return "it is the last one that serves"
        least, counts = self._least(record.component), counted.roles[record.component]
        if max(counts.starting + counts.ready - 1, others) < least:
            return f"there would be fewer than the minimum, {least}"
        return ""

    async def _order(self, record: SwitchRecord, counted: Counted) -> Order:
        self._may_act()
        counts = counted.roles[record.component]
        count = max(counts.starting + counts.ready - 1, 0)
        version = await self._target.next_version(
            counted.version, record.component, count, record.reason, up=None
        )
        return Order(
            component=record.component,
            version=version,
            count=count,
            lease_id=record.lease_id,
            host=record.host,
            to=record.to,
        )

    async def _enter(self, one: _Running, phase: _Phase) -> None:
        if needs_new_id(one):
            id = await self._target.new_id(one.record.id)
            one.record = msgspec.structs.replace(one.record, id=id)
        await enter(one, phase, self._key, self._store, self._records)

    async def _end(self, one: _Running, outcome: str) -> None:
        if outcome == "refused":
            # No worker has changed its role.
            await self._store.delete(self._key)
        else:
            self._left.add(one.record.lease_id)
            await self._enter(one, "ended")
        self._one = None
        self.ended[one.record.to, "switch", outcome] += 1
        record, took = one.record, f", {one.record.took}" if one.record.took else ""
        logger.info("switch of a %s to %s: %s%s", record.component, record.to, outcome, took)


def _find(switches: Sequence[SwitchState], record: SwitchRecord) -> SwitchState | None:
    return next(
        (one for one in switches if (one.lease_id, one.to) == (record.lease_id, record.to)), None
    )

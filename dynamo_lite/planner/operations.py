"""Carries out changes of the numbers of workers, each to its end, also over a planner's death.

A change is a record in etcd without a lease, written before the first order. Each step looks at
what is there and orders what is missing, so a leader that takes over repeats no order that was
taken: an addition is complete when there are `count` workers, a removal names its victim.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from dynamo_lite.planner.connector import Connector, Counted, Order
from dynamo_lite.planner.departure import Departure, worker_of
from dynamo_lite.planner.policy.drain import Safe
from dynamo_lite.planner.target import Target
from dynamo_lite.planner.under_way import RunningOperation, UnderWay
from dynamo_lite.protocol.errors import DynamoLiteError, Refused, UnknownWorker
from dynamo_lite.protocol.planner import OperationRecord, RoleCounts
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.store import Store

logger = logging.getLogger(__name__)

_RETRY = Backoff(first_s=1.0, factor=2.0, longest_s=60.0)


class Operations:
    """may_act: how long an act may take, in seconds; raises Unavailable unless this process leads.
    Called before each act. members: the main record of each live process. least: the minimum of a
    component's workers. certificates: of this process."""

    def __init__(
        self,
        under_way: UnderWay,
        store: Store,
        namespace: str,
        connector: Connector,
        target: Target,
        may_act: Callable[[], float],
        clock: Clock,
        members: Callable[[], Iterable[EndpointRecord]],
        least: Callable[[str], int] = lambda component: 0,
        certificates: Certificates | None = None,
    ):
        self._under_way = under_way
        self._members, self._least = members, least
        self._store, self._namespace = store, namespace
        self._connector, self._target, self._may_act = connector, target, may_act
        self._clock, self._certificates = clock, certificates

    # Begin

    async def add(self, component: str, size: int, counted: Counted, reason: str) -> None:
        """Raises Unavailable or StoreUnavailable; no order was given then."""
        now = counted.roles[component]
        count = now.starting + now.ready + size
        await self._begin(component, "add", count, counted, reason, before=count - size)

    async def remove(
        self,
        component: str,
        victim: EndpointRecord | None,
        counted: Counted,
        reason: str,
        within_s: float,
    ) -> None:
        """victim: None removes a starting worker. Raises as `add`."""
        now = counted.roles[component]
        count = max(now.starting + now.ready - self._under_way.to_be_ordered(component) - 1, 0)
        await self._begin(component, "remove", count, counted, reason, victim, within_s)

    async def _begin(
        self,
        component: str,
        kind: str,
        count: int,
        counted: Counted,
        reason: str,
        victim: EndpointRecord | None = None,
        within_s: float = 1e9,
        before: int = 0,
    ) -> None:
        self._may_act()
        version = await self._target.next_version(
            counted.version, component, count, reason, up=kind == "add"
        )
        record = OperationRecord(
            id=version,
            kind="add" if kind == "add" else "remove",
            component=component,
            phase="ordered",
            count=count,
            before=before,
            lease_id=victim.lease_id if victim else 0,
            host=victim.host if victim else "",
            status_url=victim.status_url if victim else "",
            reason=reason[:1024],
            at=self._clock.wall(),
            within_s=within_s,
        )
        # Before its record is stored: a put that fails may have stored it.
        await self._step(self._under_way.begins(record), counted)

    async def withdraw(self, operation: int) -> None:
        """Cancels a start. Raises Unavailable or StoreUnavailable."""
        self._may_act()
        if (one := self._under_way.get(operation)) is not None:
            await self._under_way.enter(one, "withdrawing")

    # Go on

    async def advance(self, counted: Counted) -> None:
        """Takes each operation as far as possible now. Raises Unavailable, when this process may
        not act, or StoreUnavailable."""
        for component, counts in counted.roles.items():
            await self._end_removals(component, counts)
        for one in self._under_way:
            if self._clock.monotonic() >= one.retry_at and one.record.component in counted.roles:
                await self._step(one, counted)

    async def _step(self, one: RunningOperation, counted: Counted) -> None:
        """Failures of the connector and of etcd put it off."""
        what = f"{one.record.kind} {one.record.component}"
        within_s = self._may_act()
        try:
            async with asyncio.timeout(within_s):
                if not one.stored:
                    await self._under_way.enter(one, one.record.phase)
                await self._go_on(one, counted)
        except Refused as exc:
            logger.warning("%s: %s", what, exc)
            if isinstance(exc, UnknownWorker):
                self._under_way.foreign.add(one.record.lease_id)
            await self._under_way.end(one, "refused")
        except (DynamoLiteError, TimeoutError) as exc:
            restart = _RETRY.after_exit(one.failures, 0.0)
            one.failures = restart.failures
            one.retry_at = self._clock.monotonic() + restart.delay_s
            logger.warning("%s is tried again in %g s: %s", what, restart.delay_s, exc)

    async def _go_on(self, one: RunningOperation, counted: Counted) -> None:
        counts = counted.roles[one.record.component]
        match one.record.kind, one.record.phase:
            case "add", "ordered":
                await self._order_additions(one, counted, counts)
            case "add", "asked":
                await self._await_start(one, counts)
            case "add", "withdrawing":
                await self._order_withdrawal(one, counted, counts)
            case "remove", "ordered":
                await self._order_removal(one, counted, counts)
            case "remove", "leaving":
                await self._await_leaving(one, counted)
            case _:
                pass

    async def _order_additions(
        self, one: RunningOperation, counted: Counted, counts: RoleCounts
    ) -> None:
        version = counted.version
        for count in range(counts.starting + counts.ready + 1, one.record.count + 1):
            version = await self._version(one, version)
            await self._connector.add(self._order(one, version, count))
        await self._under_way.enter(one, "asked")

    async def _await_start(self, one: RunningOperation, counts: RoleCounts) -> None:
        if counts.starting:
            return
        await self._under_way.end(one, "failed" if counts.ready < one.record.count else "done")

    async def _order_withdrawal(
        self, one: RunningOperation, counted: Counted, counts: RoleCounts
    ) -> None:
        version = counted.version
        # Also a worker of before may be starting again.
        least = max(one.record.before, counts.ready)
        for count in range(counts.starting + counts.ready - 1, least - 1, -1):
            version = await self._version(one, version)
            await self._connector.remove(self._order(one, version, count))
        await self._under_way.end(one, "withdrawn")

    async def _order_removal(
        self, one: RunningOperation, counted: Counted, counts: RoleCounts
    ) -> None:
        record = one.record
        if not record.lease_id:
            if counts.starting and counts.starting + counts.ready > record.count:
                version = await self._version(one, counted.version)
                await self._connector.remove(self._order(one, version, record.count))
            await self._under_way.end(one, "done")
        elif why := self._too_few(record, counts):
            raise Refused(why, elsewhere=False)
        elif self._connector.chooses_victim:
            version = await self._version(one, counted.version)
            await self._connector.remove(self._order(one, version, record.count))
            await self._under_way.enter(one, "asked")
        else:
            await self._connector.prefer(self._order(one, counted.version, record.count))
            await self._store.revoke(record.lease_id)
            await self._under_way.enter(one, "leaving")

    def _too_few(self, record: OperationRecord, counts: RoleCounts) -> str:
        """Why its worker must stay; empty if it may go. Since the removal was decided, others may
        have gone. A worker that is no member any more, or drains, has got its order already."""
        members = [m.lease_id for m in self._members() if m.component == record.component]
        if record.lease_id not in members or counts.draining:
            return ""
        serving = len(set(members) - self._under_way.victims(members)) + 1
        if serving < 2:
            return "it is the last one that serves"
        least = self._least(record.component)
        own = counts.starting + counts.ready - self._under_way.leaving(record.component)
        if max(own, serving) <= least:
            return f"there would be fewer than the minimum, {least}"
        return ""

    async def _await_leaving(self, one: RunningOperation, counted: Counted) -> None:
        """Asks the worker to leave. Orders its end when it has drained or its deadline is over."""
        record = one.record
        if one.departure is None:
            worker = worker_of(record, self._namespace)
            one.departure = Departure(
                worker, self._clock.monotonic, certificates=self._certificates
            )
        verdict = await one.departure.look(self._members())
        late = self._clock.monotonic() - one.began > record.within_s
        if not isinstance(verdict, Safe) and not late:
            logger.debug("worker %x is not safe to end: %s", record.lease_id, verdict.reason)
            return
        if any(
            other.record.phase == "leaving"
            and other.record.component == record.component
            and other.record.count > record.count
            for other in self._under_way
        ):
            # The order to have `count` workers would end that one, too.
            return
        if not isinstance(verdict, Safe):
            logger.warning("worker %x is ended: %s", record.lease_id, verdict.reason)
        counts = counted.roles[record.component]
        asked = self._under_way.asked_to_leave(record.component)
        if (stay := counts.starting + counts.ready - asked - 1) > record.count:
            # Others have come since it was decided, by an operator for example. They stay.
            one.record = record = msgspec.structs.replace(record, count=stay)
            await self._under_way.enter(one, "leaving")
        if counts.starting + counts.ready > record.count:
            version = await self._version(one, counted.version)
            await self._connector.remove(self._order(one, version, record.count))
        await self._under_way.enter(one, "asked")

    async def _end_removals(self, component: str, counts: RoleCounts) -> None:
        """Completes as many removals, oldest first, as workers have stopped draining, and those
        whose worker's own deadline has passed."""
        asked = [
            one
            for one in self._under_way
            if (one.record.component, one.record.kind, one.record.phase)
            == (component, "remove", "asked")
        ]
        if self._connector.chooses_victim:
            gone = asked[: max(len(asked) - counts.draining, 0)]
        else:
            gone = [o for o in asked if counts.starting + counts.ready <= o.record.count]
        for one in asked:
            if one in gone:
                await self._under_way.end(one, "done")
            elif self._clock.monotonic() - one.began > one.record.within_s:
                await self._under_way.end(one, "late")

    async def _version(self, one: RunningOperation, above: int) -> int:
        self._may_act()
        record = one.record
        return await self._target.next_version(
            above, record.component, record.count, record.reason, up=None
        )

    def _order(self, one: RunningOperation, version: int, count: int) -> Order:
        record = one.record
        lease_id = 0 if record.phase == "withdrawing" else record.lease_id
        return Order(
            component=record.component,
            version=version,
            count=count,
            lease_id=lease_id,
            host=record.host,
        )

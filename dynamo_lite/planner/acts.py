"""Carries out changes of the numbers of workers.

The record says first what is wanted. Nothing has to be resumed: the next leader looks at what is
wanted and at what is there.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import msgspec

from dynamo_lite.planner import drains
from dynamo_lite.planner.connector import COMPONENTS, ROLES, Connector
from dynamo_lite.planner.departure import Departure, worker_of
from dynamo_lite.planner.policy.drain import NoVictim, Safe, victim
from dynamo_lite.planner.policy.memory import Change
from dynamo_lite.planner.record import PlannerRecords, with_role
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError, Refused, Unavailable
from dynamo_lite.protocol.planner import (
    LeavingWorker,
    RoleCounts,
    WantedRecord,
    WantedWorkers,
)
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.process.component import Host

logger = logging.getLogger(__name__)


class Acts:
    """members: the main record of each live process, by its lease."""

    def __init__(
        self,
        host: Host,
        connector: Connector,
        records: PlannerRecords,
        members: Callable[[], Mapping[int, EndpointRecord]],
    ):
        self._host, self._connector, self._records = host, connector, records
        self._members = members
        #: Leases of workers that were removed here.
        self._removed: set[int] = set()
        #: Whether the record may tell of an order that was not given, and has not been settled.
        self.unsure = False
        self._departures: dict[int, Departure] = {}

    def foreign(self) -> list[int]:
        """Leases of workers that cannot be removed here."""
        return [
            lease_id
            for lease_id, worker in self._members().items()
            if worker.component in ROLES
            and not self._connector.owns(worker)
            and lease_id not in self._removed
        ]

    async def begin(self, change: Change, now: RoleCounts) -> bool:
        """Returns False without a worker that may be removed. Raises Unavailable if this process
        may not act, and as `Connector`."""
        component = COMPONENTS[change.role]
        chosen: EndpointRecord | None = None
        if change.kind == "remove" and (chosen := await self._victim(component)) is None:
            return False
        leaving = self._leaving(chosen)
        role = WantedWorkers(count=0, up=True, by="", reason="")

        def wanted(record: WantedRecord) -> WantedRecord:
            nonlocal role
            if record.paused is not None and not record.manual:
                raise Unavailable("paused")
            before = record.roles.get(component, role)
            role = msgspec.structs.replace(
                before,
                count=max(now.starting + now.ready + change.by - len(before.leaving), 0),
                up=before.up if change.withdraws else change.by > 0,
                by=f"{self._host.lease.id:x}",
                reason=change.reason[:1024],
                at=before.at if change.withdraws else self._host.clock.wall(),
                starting=change.by > 0,
                leaving=(*before.leaving, *leaving),
                failures=before.failures + change.withdraws,
            )
            return with_role(record, component, role)

        unsure, self.unsure = self.unsure, True
        await self._records.edit(wanted)
        try:
            async with asyncio.timeout(self._records.may_act()):
                await self._order(component, role, chosen)
        except (DynamoLiteError, TimeoutError) as exc:
            refused = isinstance(exc, Refused)
            await self._records.edit(
                lambda record: _not_begun(record, component, role, change, refused=refused)
            )
            self.unsure = unsure
            raise
        self.unsure = unsure
        return True

    def _leaving(self, chosen: EndpointRecord | None) -> tuple[LeavingWorker, ...]:
        if chosen is None or self._connector.chooses_victim:
            return ()
        return (
            LeavingWorker(
                lease_id=chosen.lease_id,
                host=chosen.host,
                status_url=chosen.status_url,
            ),
        )

    async def _order(
        self, component: str, role: WantedWorkers, chosen: EndpointRecord | None
    ) -> None:
        if chosen is None or self._connector.chooses_victim:
            lease_id = 0 if chosen is None else chosen.lease_id
            await self._connector.change(component, role.count + len(role.leaving), lease_id)
        else:
            await self._connector.prefer(chosen)
            await self._host.store.revoke(chosen.lease_id)
        if chosen is not None:
            self._removed.add(chosen.lease_id)

    async def _victim(self, component: str) -> EndpointRecord | None:
        """The one to remove; see `planner/policy/drain.py`."""
        members = self._members()
        self._removed &= members.keys()
        seen = await drains.look(members.values(), self._host.certificates)
        workers = seen.workers(component)
        if self._connector.chooses_victim:
            # An order removes none if another one has left by itself meanwhile.
            self._removed -= {w.record.lease_id for w in workers if w.candidate.serves}
        own = {w.record.lease_id for w in workers if self._connector.owns(w.record)}
        found = victim([worker.candidate for worker in workers], among=own - self._removed)
        if isinstance(found, NoVictim):
            logger.warning("no %s is removed: %s", component, found.reason)
            return None
        logger.info("%s %x is removed: %s", component, found.lease_id, found.reason)
        return members.get(found.lease_id)

    # Where the victim is not chosen

    async def end_leaving(
        self, wanted: WantedRecord, counts: Mapping[str, RoleCounts], within_s: float
    ) -> WantedRecord:
        """Ends the oldest worker of each role that leaves, if it has drained or has drained for
        `within_s`. One whose lease was not revoked stays. Returns the record, which has changed
        with each of them. Raises as `begin`."""
        for component, role in wanted.roles.items():
            if not role.leaving or component not in counts:
                continue
            first = min(role.leaving, key=lambda one: self._stays(one) is None)
            stays = self._stays(first)
            if stays is None and not await self._may_end(component, first, within_s):
                continue
            count, now = role.count + len(role.leaving) - 1, counts[component]
            async with asyncio.timeout(self._records.may_act()):
                if stays is not None:
                    # One that is refused was never preferred.
                    with contextlib.suppress(Refused, ProtocolError):
                        await self._connector.prefer(stays, ends=False)
                elif now.starting + now.ready > count:
                    await self._connector.change(component, count)
            self._departures.pop(first.lease_id, None)
            wanted = await self._records.edit(
                lambda record, name=component, gone=first, more=stays is not None: _without(
                    record, name, gone, more=more
                )
            )
        return wanted

    def _stays(self, leaving: LeavingWorker) -> EndpointRecord | None:
        """Its record if its lease was not revoked: that failed, or the planner ended before it."""
        lease_id = leaving.lease_id
        return None if lease_id in self._removed else self._members().get(lease_id)

    async def _may_end(self, component: str, leaving: LeavingWorker, within_s: float) -> bool:
        now = self._host.clock.monotonic
        departure = self._departures.get(leaving.lease_id)
        if departure is None:
            worker = worker_of(component, leaving, self._host.spec.namespace)
            departure = Departure(worker, now, certificates=self._host.certificates)
            self._departures[leaving.lease_id] = departure
        verdict = await departure.look(self._members().values())
        late = now() - departure.began > within_s
        if late and not isinstance(verdict, Safe):
            logger.warning("worker %x is ended: %s", leaving.lease_id, verdict.reason)
        return late or isinstance(verdict, Safe)


def _without(
    record: WantedRecord, component: str, gone: LeavingWorker, *, more: bool
) -> WantedRecord:
    """Without a worker that leaves. more: it stays."""
    if (role := record.roles.get(component)) is None or gone not in role.leaving:
        return record
    left = tuple(one for one in role.leaving if one != gone)
    return with_role(
        record, component, msgspec.structs.replace(role, leaving=left, count=role.count + more)
    )


def _not_begun(
    record: WantedRecord, component: str, role: WantedWorkers, change: Change, *, refused: bool
) -> WantedRecord:
    """After an order that was not given, or may not have been. A start that is refused has
    failed. A worker that was to leave stays in `leaving` until `end_leaving` has looked at it."""
    if record.roles.get(component) != role:
        return record
    role = msgspec.structs.replace(
        role, starting=role.starting and refused, failures=role.failures - change.withdraws
    )
    return with_role(record, component, role)

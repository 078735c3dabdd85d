"""The planner's records in etcd: what is wanted, and who leads.

A planner leads while the leader's key holds its own lease. It creates the key under that lease, so
the key goes when the planner does, and another one creates it. Each act needs a third of the
lease's time: an act and its timeouts then end before another planner can lead.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ProtocolError, StoreUnavailable, Unavailable
from dynamo_lite.protocol.planner import (
    LeaderRecord,
    RoleCounts,
    WantedRecord,
    WantedWorkers,
)
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.store import Delete, Put, Snapshot, Store, WatchEvent, until_listed
from dynamo_lite.runtime.tasks import running

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
#: Share of the rest of the lease that one act may take. The rest is for a timeout that is noticed
#: late.
_ACT_SHARE = 0.8

WantedEdit = Callable[[WantedRecord], WantedRecord]


async def edit(store: Store, namespace: str, change: WantedEdit) -> WantedRecord:
    """Replaces the wanted numbers, and returns the new ones. A record that cannot be read is
    replaced. Raises Unavailable when another writer was faster."""
    key = names.planner_wanted_key(namespace)
    old, record = await store.get(key), WantedRecord()
    try:
        record = record if old is None else decode_json(old, WantedRecord)
    except ProtocolError as exc:
        logger.warning("%s is replaced: %s", key, exc)
    if (new := change(record)) == record:
        return record
    if not await store.swap(key, old, encode_json(new)):
        raise Unavailable(f"{key} was changed by another process meanwhile")
    return new


def with_role(record: WantedRecord, component: str, role: WantedWorkers) -> WantedRecord:
    return msgspec.structs.replace(record, roles={**record.roles, component: role})


def settled(
    record: WantedRecord, counts: Mapping[str, RoleCounts], *, elected: bool
) -> WantedRecord:
    """With what has become of the last changes. Other processes may change the numbers, and what
    is there then is wanted.

    elected: the planner has just been elected: an order may not have been given at all, and its
    start has not failed.
    """
    for component, now in counts.items():
        role = record.roles.get(component)
        if role is None or (role.starting and now.starting):
            continue
        facts: dict[str, Any] = {"starting": False}
        if role.starting and now.ready >= role.count:
            facts["failures"] = 0
        elif role.starting and not elected:
            facts["failures"] = role.failures + 1
        count = now.starting + now.ready - len(role.leaving)
        # One that leaves may be gone already, and its planner has ended before it wrote that.
        facts["count"] = max(count, role.count) if role.leaving else count
        record = with_role(record, component, msgspec.structs.replace(role, **facts))
    return record


class PlannerRecords:
    """Async context manager; entering it waits for the first listing. elects: whether this process
    may be elected. Raises DeadlineExceeded or StoreUnavailable."""

    def __init__(self, host: Host, *, elects: bool):
        self._host, self._elects = host, elects
        namespace = host.spec.namespace
        self._prefix = names.planner_prefix(namespace)
        self._leader_key = names.planner_leader_key(namespace)
        self._wanted_key = names.planner_wanted_key(namespace)
        #: The lease of the planner that leads; 0: none does.
        self._leader = 0
        #: None: it cannot be read.
        self.wanted: WantedRecord | None = WantedRecord()
        self._listed = asyncio.Event()
        self._vacant = asyncio.Event()
        self._stack = AsyncExitStack()

    @property
    def why_not(self) -> str:
        """Why this process may not act; empty if it may."""
        lease = self._host.lease
        if not self._leader:
            return "no planner leads"
        if self._leader != lease.id:
            return f"the planner with lease {self._leader:x} leads"
        if lease.loss is not None or lease.remaining_s() < lease.ttl_s / 3:
            return "its lease was not renewed in time: etcd is away"
        return ""

    def may_act(self) -> float:
        """How many seconds an act may take now. Raises Unavailable if there may be none."""
        if why := self.why_not:
            raise Unavailable(why)
        return self._host.lease.remaining_s() * _ACT_SHARE

    async def edit(self, change: WantedEdit) -> WantedRecord:
        """As `edit`, if this process may act now. Raises Unavailable or TimeoutError."""
        async with asyncio.timeout(self.may_act()):
            return await edit(self._host.store, self._host.spec.namespace, change)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            events = await stack.enter_async_context(self._host.store.watch(self._prefix))
            await stack.enter_async_context(running(self._follow(events), name="planner records"))
            if self._elects:
                election = running(self._elect(), name="planner election")
                await stack.enter_async_context(election)
            await until_listed(self._listed, f"records at {self._prefix}")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _follow(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            match event:
                case Snapshot(entries):
                    for key in (self._leader_key, self._wanted_key):
                        self._note(key, entries.get(key))
                case Put(key, value):
                    self._note(key, value)
                case Delete(key):
                    self._note(key, None)
            self._listed.set()

    def _note(self, key: str, value: bytes | None) -> None:
        """One that cannot be read is logged and counted."""
        try:
            if key == self._leader_key:
                self._leader = 0 if value is None else decode_json(value, LeaderRecord).lease_id
                self._vacant.set() if value is None else self._vacant.clear()
            elif key == self._wanted_key:
                self.wanted = None
                self.wanted = WantedRecord() if value is None else decode_json(value, WantedRecord)
        except ProtocolError as exc:
            self._host.drops("record")
            logger.warning("%s is ignored: %s", key, exc)

    async def _elect(self) -> None:
        host = self._host
        while True:
            await self._vacant.wait()
            record = LeaderRecord(lease_id=host.lease.id)
            try:
                await host.store.create(self._leader_key, encode_json(record), lease=host.lease)
            except StoreUnavailable as exc:
                logger.debug("no election: %s", exc)
            # The watch tells who has won. If it does not, the key has gone again.
            await asyncio.sleep(_RETRY_S)

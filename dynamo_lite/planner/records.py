"""The planner's records in etcd: who leads, what is wanted, and whether it is paused.

A planner leads while the leader's key holds its own lease. It creates the key under that lease, so
the key goes when the planner does, and another one creates it. Each act needs a third of the
lease's time: an act and its timeouts then end before another planner can lead.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Self, TypeVar

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import (
    ProtocolError,
    StoreUnavailable,
    Unavailable,
)
from dynamo_lite.protocol.planner import (
    LeaderRecord,
    PauseRecord,
    TargetRecord,
)
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.store import Delete, Put, Snapshot, WatchEvent, until_listed
from dynamo_lite.runtime.tasks import running

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
#: Share of the rest of the lease that one act may take. The rest is for a timeout that is noticed
#: late.
_ACT_SHARE = 0.8

R = TypeVar("R", LeaderRecord, PauseRecord, TargetRecord)


class PlannerRecords:
    """Async context manager; entering it waits for the first listing. elects: whether this process
    may be elected. Raises DeadlineExceeded or StoreUnavailable."""

    def __init__(self, host: Host, *, elects: bool):
        self._host, self._elects = host, elects
        namespace = host.spec.namespace
        self._prefix = names.planner_prefix(namespace)
        self._leader_key = names.planner_leader_key(namespace)
        self._target_key = names.planner_target_key(namespace)
        self._pause_key = names.planner_pause_key(namespace)
        self._values: dict[str, bytes] = {}
        #: By key: the last value that could not be read.
        self._ignored: dict[str, bytes] = {}
        self._listed = asyncio.Event()
        self._vacant = asyncio.Event()
        self._stack = AsyncExitStack()

    @property
    def leader(self) -> LeaderRecord | None:
        return self._decoded(self._leader_key, LeaderRecord)

    @property
    def target(self) -> TargetRecord | None:
        return self._decoded(self._target_key, TargetRecord)

    @property
    def paused(self) -> str:
        """Why the planner is paused; empty if it is not. A record that cannot be read pauses."""
        if self._pause_key not in self._values:
            return ""
        record = self._decoded(self._pause_key, PauseRecord)
        if record is None:
            return "paused by a record that cannot be read"
        return "paused" + (f": {record.reason}" if record.reason else "")

    def _decoded(self, key: str, kind: type[R]) -> R | None:
        """None without a record and for one that cannot be read, which is logged and counted
        once."""
        value = self._values.get(key)
        if value is None:
            return None
        try:
            return decode_json(value, kind)
        except ProtocolError as exc:
            if self._ignored.get(key) != value:
                self._ignored[key] = value
                self._host.drops("record")
                logger.warning("%s is ignored: %s", key, exc)
            return None

    @property
    def leads(self) -> bool:
        """Whether this process may act now."""
        lease = self._host.lease
        leader = self.leader
        if leader is None or leader.lease_id != lease.id or lease.loss is not None:
            return False
        return lease.remaining_s() >= lease.ttl_s / 3

    @property
    def why_not(self) -> str:
        """Why this process may not act; empty if it may."""
        if self.leads:
            return ""
        leader = self.leader
        if leader is None:
            return "no planner leads"
        if leader.lease_id != self._host.lease.id:
            return f"the planner with lease {leader.lease_id:x} leads"
        return "its lease was not renewed in time: etcd is away"

    def may_act(self) -> float:
        """How many seconds an act may take now. Raises Unavailable if there may be none."""
        if why := self.why_not:
            raise Unavailable(why)
        return self._host.lease.remaining_s() * _ACT_SHARE

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
                    self._values = dict(entries)
                case Put(key, value):
                    self._values[key] = value
                case Delete(key):
                    self._values.pop(key, None)
            if self._leader_key in self._values:
                self._vacant.clear()
            else:
                self._vacant.set()
            self._listed.set()

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

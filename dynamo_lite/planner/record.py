"""The planner's records in etcd: what is wanted, and who leads.

A planner leads while the leader's key holds its own lease. It creates the key under that lease, so
the key goes when the planner does, and another one creates it. Each act needs a third of the
lease's time: an act and its timeouts then end before another planner can lead.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ProtocolError, Unavailable
from dynamo_lite.protocol.planner import LeaderRecord, WantedRecord
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.store import Store

logger = logging.getLogger(__name__)

#: Share of the rest of the lease that one act may take. The rest is for a timeout that is noticed
#: late.
_ACT_SHARE = 0.8
_TRIES = 20

WantedEdit = Callable[[WantedRecord], WantedRecord]


@dataclass(kw_only=True)
class Records:
    #: The lease of the planner that leads; 0: none does, or its record cannot be read.
    leader: int = 0
    #: None: it cannot be read.
    wanted: WantedRecord | None = field(default_factory=WantedRecord)
    #: Of those that cannot be read: the key, and why.
    malformed: list[str] = field(default_factory=list[str])


async def read(store: Store, namespace: str) -> Records:
    """Raises StoreUnavailable."""
    entries = await store.get_prefix(names.planner_prefix(namespace))
    found = Records()

    def decoded(key: str, kind: type[Any], absent: Any) -> Any:
        try:
            return decode_json(entries[key], kind) if key in entries else absent
        except ProtocolError as exc:
            found.malformed.append(f"{key}: {exc}")
            return None

    if leader := decoded(names.planner_leader_key(namespace), LeaderRecord, None):
        found.leader = leader.lease_id
    found.wanted = decoded(names.planner_wanted_key(namespace), WantedRecord, found.wanted)
    return found


async def edit(store: Store, namespace: str, change: WantedEdit) -> WantedRecord:
    """Replaces what is wanted, and returns that. A record that cannot be read is replaced. Raises
    Unavailable after many conflicts with other writers."""
    key = names.planner_wanted_key(namespace)
    for _ in range(_TRIES):
        old, record = await store.get(key), WantedRecord()
        try:
            record = record if old is None else decode_json(old, WantedRecord)
        except ProtocolError as exc:
            logger.warning("%s is replaced: %s", key, exc)
        new = change(record)
        if new == record or await store.swap(key, old, encode_json(new)):
            return new
    raise Unavailable(f"{key} was changed by other processes again and again")


class PlannerRecords:
    """elects: whether this process may be elected."""

    def __init__(self, host: Host, *, elects: bool):
        self._host, self._elects = host, elects
        self._leader = 0
        #: As it was last read. None: it cannot be read.
        self.wanted: WantedRecord | None = WantedRecord()

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

    async def edit(self, change: WantedEdit) -> None:
        """As `edit`, if this process may act now. Raises Unavailable or TimeoutError."""
        async with asyncio.timeout(self.may_act()):
            store, namespace = self._host.store, self._host.spec.namespace
            self.wanted = await edit(store, namespace, change)

    async def read(self) -> None:
        """Reads both records. If no planner leads, this one does. Raises StoreUnavailable."""
        host, namespace = self._host, self._host.spec.namespace
        found = await read(host.store, namespace)
        for what in found.malformed:
            host.drops("record")
            logger.warning("ignored: %s", what)
        if not found.leader and self._elects:
            key, own = names.planner_leader_key(namespace), LeaderRecord(lease_id=host.lease.id)
            if await host.store.create(key, encode_json(own), lease=host.lease):
                found.leader = own.lease_id
        self._leader, self.wanted = found.leader, found.wanted

"""A router's side: the KV blocks and the load of every live worker, kept up to date.

A snapshot repairs the index of a worker that has just joined, whose notices have a gap, or
that may have published while NATS was disconnected. Until the snapshot comes, the old state
is used: it only affects the choice of workers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import DeadlineExceeded, ProtocolError, Unavailable
from dynamo_lite.protocol.kv import (
    KvChange,
    KvNotice,
    KvRemoved,
    KvSnapshot,
    KvSnapshotRequest,
    KvStored,
    Load,
    decode_kv_notice,
    decode_kv_snapshot,
)
from dynamo_lite.protocol.versions import unsupported
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.routing.worker_loads import Shard
from dynamo_lite.runtime.drops import OnDrop, counted
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: A reported load that is older than this is stale and ignored.
LOAD_AGE_S = 3.0

_REQUEST_S = 2.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
#: How many notices are kept while a snapshot is fetched.
_MAX_ASIDE = 10_000


class WorkerView:
    """What is known of one worker, from its notices and snapshots. Bookkeeping only: no I/O."""

    def __init__(self, lease_id: int, model: str):
        self.lease_id, self.model = lease_id, model
        #: Number of the last notice that is in the index. None while a snapshot is needed.
        self.number: int | None = None
        #: The last reported load, and when it was received by the caller's clock.
        self.load: Load | None = None
        self.heard_at = 0.0
        #: Tokens per block.
        self.block_size = 0
        #: The index with its blocks; None before the first snapshot.
        self.index: KvIndex | None = None
        #: Notices that wait for a snapshot.
        self._aside: list[KvNotice] = []

    def __repr__(self) -> str:
        return f"<WorkerView {self.lease_id:x} number={self.number} aside={len(self._aside)}>"

    def invalidate(self) -> None:
        """Notices may be missing: keeps the index as it is until a snapshot comes."""
        self.number = None
        self._aside.clear()

    def receive(self, notice: KvNotice) -> str:
        """Returns what was done with it: "applied", "late" (dropped), or kept until a snapshot
        comes: "gap" when it is the first notice after a gap, else "aside"."""
        if self.number is None:
            self._put_aside(notice)
            return "aside"
        if notice.number <= self.number:
            return "late"
        if notice.number > self.number + 1:
            self.invalidate()
            self._put_aside(notice)
            return "gap"
        self._apply(notice)
        return "applied"

    def apply_snapshot(self, parts: Sequence[KvSnapshot]) -> bool:
        """Applies all parts of a snapshot, in the order in which they were requested.

        Then it applies the kept notices after the first part's number. Later parts may include
        some of them already; applying these twice is harmless. Returns False when a notice is
        missing: then another snapshot is needed.
        """
        if self.index is not None:
            held = {key for part in parts for key in part.held}
            self.index.replace(self.lease_id, held)
        self.number = parts[0].number
        aside, self._aside = self._aside, []
        if "gap" in [self.receive(notice) for notice in aside]:
            self.invalidate()
            return False
        return True

    def _put_aside(self, notice: KvNotice) -> None:
        if len(self._aside) >= _MAX_ASIDE:
            self._aside.clear()  # the gap is detected when the rest is applied
        self._aside.append(notice)

    def _apply(self, notice: KvNotice) -> None:
        self.number = notice.number
        if self.index is not None:
            for change in notice.changes:
                self._change(self.index, change)

    def _change(self, index: KvIndex, change: KvChange) -> None:
        match change:
            case KvStored(hashes):
                index.stored(self.lease_id, hashes)
            case KvRemoved(hashes):
                index.removed(self.lease_id, hashes)
            case _:
                index.replace(self.lease_id, set())


class KvFollower:
    """Async context manager over the members of an open roster. Implements `KvView`.

    max_blocks: how many distinct blocks each index keeps. There is one index for each model
    and block size.
    """

    def __init__(
        self,
        messaging: Messaging,
        roster: Roster,
        *,
        namespace: str,
        component: str,
        max_blocks: int,
        registry: CollectorRegistry,
        on_drop: OnDrop,
    ):
        self._messaging, self._roster, self._on_drop = messaging, roster, on_drop
        self._namespace, self._component = namespace, component
        self._max_blocks = max_blocks
        self._peers: dict[int, WorkerView] = {}
        self._indexes: dict[tuple[str, int], KvIndex] = {}
        self._repairs: dict[int, asyncio.Task[None]] = {}
        self._tasks = OwnedTasks()
        self._on_load: Callable[[int], None] = lambda lease_id: None
        self._stack = contextlib.AsyncExitStack()
        self._metrics = _Metrics(registry, self)

    def __repr__(self) -> str:
        return f"<KvFollower peers={len(self._peers)} repairs={len(self._repairs)}>"

    @property
    def indexes(self) -> Sequence[KvIndex]:
        return tuple(self._indexes.values())

    def on_load(self, callback: Callable[[int], None]) -> None:
        """Sets the callback that takes the lease id of each worker that has reported its load."""
        self._on_load = callback

    def load(self, lease_id: int) -> Load | None:
        peer = self._peers.get(lease_id)
        if peer is None or peer.heard_at + LOAD_AGE_S < self._now():
            return None
        return peer.load

    def shard(self, lease_id: int) -> Shard | None:
        peer = self._peers.get(lease_id)
        if peer is None or peer.index is None:
            return None
        return Shard(peer.block_size, peer.index)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._tasks.end)
            subject = names.kv_subject(self._namespace, self._component)
            handler = counted(self._on_notice, "kv_notice", self._on_drop)
            await stack.enter_async_context(self._messaging.serve(subject, handler))
            stack.enter_context(self._messaging.watch_connection(self._on_connection))
            stack.enter_context(self._roster.on_change(self._on_roster))
            self._on_roster(frozenset(m.lease_id for m in self._roster.members), frozenset())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Notices, members, connection

    async def _on_notice(self, payload: bytes) -> None:
        notice = decode_kv_notice(payload)
        if notice.wire_version != WIRE_VERSION:
            raise ProtocolError(unsupported(notice.wire_version))
        peer = self._peers.get(notice.lease_id)
        result = "unknown" if peer is None else self._apply_notice(peer, notice)
        self._metrics.notices.labels(result).inc()

    def _apply_notice(self, peer: WorkerView, notice: KvNotice) -> str:
        result = peer.receive(notice)
        if result != "late":
            self._update_load(peer, notice.load)
        if result == "gap":
            self._repair(peer)
        return result

    def _update_load(self, peer: WorkerView, load: Load) -> None:
        peer.load, peer.heard_at = load, self._now()
        self._on_load(peer.lease_id)

    def _on_roster(self, joined: frozenset[int], left: frozenset[int]) -> None:
        for lease_id in left:
            peer = self._peers.pop(lease_id, None)
            if (task := self._repairs.pop(lease_id, None)) is not None:
                task.cancel()
            if peer is not None and peer.index is not None:
                peer.index.leave(lease_id)
        for lease_id in joined:
            member = self._roster.get(lease_id)
            if member is not None and lease_id not in self._peers:
                self._peers[lease_id] = peer = WorkerView(lease_id, member.model)
                self._repair(peer)

    def _on_connection(self, connected: bool) -> None:
        if connected:
            for peer in self._peers.values():
                peer.invalidate()
                self._repair(peer)

    # Snapshots

    def _repair(self, peer: WorkerView) -> None:
        if peer.lease_id not in self._repairs:
            name = f"kv-snapshot {peer.lease_id:x}"
            self._repairs[peer.lease_id] = self._tasks.start(self._fetch(peer), name=name)

    async def _fetch(self, peer: WorkerView) -> None:
        """Requests snapshots until one is valid or the worker has left."""
        pause_s = _FIRST_PAUSE_S
        try:
            while self._peers.get(peer.lease_id) is peer:
                if await self._fetch_once(peer):
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            if self._repairs.get(peer.lease_id) is asyncio.current_task():
                del self._repairs[peer.lease_id]

    async def _fetch_once(self, peer: WorkerView) -> bool:
        try:
            parts = [await self._request_part(peer, 0, 0)]
            for part in range(1, parts[0].parts):
                parts.append(await self._request_part(peer, part, parts[0].parts))
        except (Unavailable, DeadlineExceeded) as exc:
            logger.debug("no KV snapshot of worker %x, retrying: %s", peer.lease_id, exc)
            return False
        except ProtocolError as exc:
            self._on_drop("kv_snapshot_reply")
            logger.warning("malformed KV snapshot of worker %x, retrying: %s", peer.lease_id, exc)
            return False
        if self._peers.get(peer.lease_id) is not peer:
            return False
        self._assign_index(peer, parts[0].block_size_tokens)
        if not peer.apply_snapshot(parts):
            return False
        self._update_load(peer, parts[-1].load)
        self._metrics.snapshots.inc()
        return True

    async def _request_part(self, peer: WorkerView, part: int, parts: int) -> KvSnapshot:
        subject = names.kv_snapshot_subject(self._namespace, self._component, peer.lease_id)
        request = encode(KvSnapshotRequest(part=part, parts=parts))
        reply = await self._messaging.request(subject, request, timeout_s=_REQUEST_S)
        snapshot = decode_kv_snapshot(reply)
        asked = (peer.lease_id, part, parts or snapshot.parts, WIRE_VERSION)
        if asked != (snapshot.lease_id, snapshot.part, snapshot.parts, snapshot.wire_version):
            raise ProtocolError("the reply does not match the request")
        return snapshot

    def _assign_index(self, peer: WorkerView, block_size: int) -> None:
        """Assigns the worker to the index of its model and block size."""
        if peer.block_size != block_size and peer.index is not None:
            peer.index.leave(peer.lease_id)
            peer.index = None
        peer.block_size = block_size
        if block_size and peer.index is None:
            key = peer.model, block_size
            if key not in self._indexes:
                self._indexes[key] = KvIndex(self._max_blocks)
            peer.index = self._indexes[key]


class _Metrics:
    """The metrics of a follower."""

    def __init__(self, registry: CollectorRegistry, follower: KvFollower):
        self.notices = Counter(
            "dynamo_lite_kv_notices",
            "KV notices of workers by result: applied; aside: kept until a snapshot comes; gap:"
            " requested a snapshot; late and unknown: dropped",
            ["result"],
            registry=registry,
        )
        self.snapshots = Counter(
            "dynamo_lite_kv_snapshots",
            "KV snapshots that were applied",
            registry=registry,
        )
        for name, text, count in (
            ("blocks", "Distinct KV blocks in the indexes", len),
            ("evicted", "Blocks that were evicted from full indexes", lambda index: index.evicted),
        ):
            Gauge(f"dynamo_lite_kv_index_{name}", text, registry=registry).set_function(
                lambda count=count: float(sum(count(index) for index in follower.indexes))
            )

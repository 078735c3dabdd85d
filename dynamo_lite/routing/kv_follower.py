"""A router's side: the KV blocks and the load of every live worker, kept up to date.

A worker of which notices were missed, or that has just joined, is asked to publish all of its
blocks. Until they come, what is known is used: it only affects the choice of workers.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.kv import (
    KvChange,
    KvCleared,
    KvNotice,
    KvRemoved,
    KvStored,
    Load,
    decode_kv_notice,
)
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.runtime.drops import OnDrop, counted
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging

#: A reported load that is older than this is stale and ignored.
LOAD_AGE_S = 3.0
#: A worker is asked for all of its blocks at most once in this time.
_ASK_S = 2.0


@dataclass
class _WorkerView:
    """What is known of one worker, from its notices."""

    lease_id: int
    model: str
    #: Number of the last notice.
    number: int = 0
    #: Whether no notice is missing since the last one with all blocks, or since the first.
    complete: bool = True
    #: When it was asked for all blocks.
    asked_at: float = -inf
    #: The last reported load, and when it was received.
    load: Load | None = None
    heard_at: float = 0.0
    #: The index with its blocks; None for a worker that does not publish them.
    index: KvIndex | None = None


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
        self._workers: dict[int, _WorkerView] = {}
        #: By model and block size.
        self._indexes: dict[tuple[str, int], KvIndex] = {}
        self._on_load: Callable[[int, float], None] = lambda lease_id, now: None
        self._stack = contextlib.AsyncExitStack()
        self._notices = _metrics(registry, self)

    def __repr__(self) -> str:
        return f"<KvFollower workers={len(self._workers)}>"

    @property
    def indexes(self) -> Sequence[KvIndex]:
        return list(self._indexes.values())

    def on_load(self, callback: Callable[[int, float], None]) -> None:
        """Sets the callback that takes the lease id of each worker that has reported its load, and
        when it was received."""
        self._on_load = callback

    def load(self, lease_id: int) -> Load | None:
        worker = self._workers.get(lease_id)
        if worker is None or worker.heard_at + LOAD_AGE_S < _now():
            return None
        return worker.load

    def index(self, lease_id: int) -> KvIndex | None:
        worker = self._workers.get(lease_id)
        return None if worker is None else worker.index

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            subject = names.kv_subject(self._namespace, self._component)
            handler = counted(self._on_notice, "kv_notice", self._on_drop)
            await stack.enter_async_context(self._messaging.serve(subject, handler))
            stack.enter_context(self._roster.on_change(self._on_roster))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _on_roster(self, joined: frozenset[int], left: frozenset[int]) -> None:
        for lease_id in left:
            worker = self._workers.pop(lease_id, None)
            if worker is not None and worker.index is not None:
                worker.index.leave(lease_id)

    async def _on_notice(self, payload: bytes) -> None:
        notice = decode_kv_notice(payload)
        if (member := self._roster.get(notice.lease_id)) is None:
            self._notices.labels("unknown").inc()
            return
        worker = self._workers.setdefault(
            member.lease_id, _WorkerView(member.lease_id, member.model)
        )
        missed = self._receive(worker, notice)
        self._notices.labels("gap" if missed else "applied").inc()
        if worker.index is not None and not worker.complete:
            # If the answer is lost, a later notice asks again.
            if _now() >= worker.asked_at + _ASK_S:
                await self._ask(worker)

    def _receive(self, worker: _WorkerView, notice: KvNotice) -> bool:
        """Returns whether notices before it were missed."""
        missed = notice.number != worker.number + 1
        whole = bool(notice.changes) and isinstance(notice.changes[0], KvCleared)
        worker.number = notice.number
        worker.complete = whole or (worker.complete and not missed)
        self._assign(worker, notice.block_size_tokens)
        if worker.index is not None:
            for change in notice.changes:
                _apply(change, worker.lease_id, worker.index)
        worker.load, worker.heard_at = notice.load, _now()
        self._on_load(worker.lease_id, worker.heard_at)
        return missed

    def _assign(self, worker: _WorkerView, block_size: int) -> None:
        """Assigns the worker to the index of its model and block size."""
        key, index = (worker.model, block_size), None
        if block_size and (index := self._indexes.get(key)) is None:
            index = self._indexes[key] = KvIndex(block_size, self._max_blocks)
        if worker.index is not None and worker.index is not index:
            worker.index.leave(worker.lease_id)
        worker.index = index

    async def _ask(self, worker: _WorkerView) -> None:
        """Asks for all blocks of the worker."""
        worker.asked_at = _now()
        subject = names.kv_snapshot_subject(self._namespace, self._component, worker.lease_id)
        with contextlib.suppress(Unavailable):
            await self._messaging.publish(subject, b"")


def _apply(change: KvChange, lease_id: int, index: KvIndex) -> None:
    match change:
        case KvStored(hashes):
            index.stored(lease_id, hashes)
        case KvRemoved(hashes):
            index.removed(lease_id, hashes)
        case _:
            index.leave(lease_id)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _metrics(registry: CollectorRegistry, follower: KvFollower) -> Counter:
    """Returns the counter of notices."""
    for name, text, count in (
        ("blocks", "Distinct KV blocks in the indexes", len),
        ("evicted", "Blocks that were evicted from full indexes", lambda index: index.evicted),
    ):
        Gauge(f"dynamo_lite_kv_index_{name}", text, registry=registry).set_function(
            lambda count=count: float(sum(count(index) for index in follower.indexes))
        )
    return Counter(
        "dynamo_lite_kv_notices",
        "KV notices of workers by result: applied; gap: some before it were missed; unknown:"
        " dropped",
        ["result"],
        registry=registry,
    )

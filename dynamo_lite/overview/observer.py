"""Observes a running graph: members and links in etcd, loads that workers publish, and each
process's health and metrics.

It stores nothing and sends nothing but GET requests to status servers.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from dynamo_lite.kv_events.follower import LOAD_AGE_S
from dynamo_lite.overview.compose import LATENCY_S, WANTED, OverviewInputs, compose, processes
from dynamo_lite.overview.fetch import fetch, fetch_health
from dynamo_lite.overview.history import CounterHistory
from dynamo_lite.overview.model import Overview
from dynamo_lite.overview.samples import Samples, parse
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, decode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.kv import Load, decode_kv_notice
from dynamo_lite.protocol.records import EndpointRecord, LinkRecord
from dynamo_lite.protocol.versions import unsupported
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.status import VLLM_METRICS
from dynamo_lite.runtime.store import Delete, Put, Snapshot, Store, WatchEvent
from dynamo_lite.runtime.tasks import running

logger = logging.getLogger(__name__)

#: Most requests to status servers at a time.
_MAX_REQUESTS = 32
#: The component that publishes loads.
_LOAD_PUBLISHER = "VllmWorker"


class Observer:
    """Async context manager; entering it waits for the first list of members.

    Raises StoreUnavailable without one. Rates and latencies cover the time between calls of
    `look`. wall: seconds since the epoch, for the ages of processes.
    """

    def __init__(
        self,
        store: Store,
        messaging: Messaging,
        namespace: str,
        on_drop: OnDrop = uncounted,
        wall: Callable[[], float] = time.time,
    ):
        self._store, self._messaging = store, messaging
        self._namespace, self._on_drop, self._wall = namespace, on_drop, wall
        self._roster = Roster(store, names.components_prefix(namespace), on_drop)
        self._links: dict[str, LinkRecord] = {}
        self._loads: dict[int, tuple[float, Load]] = {}
        self._history = CounterHistory(LATENCY_S)
        self._requests = asyncio.Semaphore(_MAX_REQUESTS)
        self._stack = contextlib.AsyncExitStack()

    def __repr__(self) -> str:
        return f"Observer({self._namespace!r}, members={len(self._roster.members)})"

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._roster)
            events = await stack.enter_async_context(
                self._store.watch(names.links_prefix(self._namespace))
            )
            follower = running(self._follow_links(events), name="observer links")
            await stack.enter_async_context(follower)
            subject = names.kv_subject(self._namespace, _LOAD_PUBLISHER)
            handler = counted(self._on_notice, "kv_notice", self._on_drop)
            await stack.enter_async_context(self._messaging.serve(subject, handler))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def members(self) -> Mapping[int, EndpointRecord]:
        """The main record of each live process, by its lease."""
        return processes(self._roster.members)

    async def look(self) -> Overview:
        """The graph now. Takes as long as the slowest process needs to respond, 1 s at most."""
        members = self._roster.members
        found = processes(members)
        requests = [self._fetch_all(record) for record in found.values()]
        served = _vllm_metrics_of(found.values())
        answers, others = await asyncio.gather(
            asyncio.gather(*requests), asyncio.gather(*map(self._first_samples, served.values()))
        )
        scraped = {str(lease_id): a[1] for lease_id, a in zip(found, answers, strict=True)}
        scraped.update(zip(served, others, strict=True))
        self._history.add(self._now(), scraped)
        seen = OverviewInputs(
            at=self._wall(),
            namespace=self._namespace,
            members=members,
            facts={lease_id: a[0] for lease_id, a in zip(found, answers, strict=True)},
            loads=self._fresh_loads(),
            links=tuple(self._links.values()),
            trouble=[] if self._messaging.connected else ["NATS is disconnected"],
        )
        return compose(seen, self._history)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _fresh_loads(self) -> Mapping[int, Load]:
        oldest = self._now() - LOAD_AGE_S
        self._loads = {i: entry for i, entry in self._loads.items() if entry[0] > oldest}
        return {lease_id: load for lease_id, (_, load) in self._loads.items()}

    async def _fetch_all(self, record: EndpointRecord) -> tuple[dict[str, Any], Samples | None]:
        url = record.status_url
        facts, samples = await asyncio.gather(self._health(url), self._samples(f"{url}/metrics"))
        return facts, samples

    async def _health(self, url: str) -> dict[str, Any]:
        async with self._requests:
            return await fetch_health(url)

    async def _first_samples(self, urls: Sequence[str]) -> Samples | None:
        """The samples of the first page that has any."""
        samples: Samples | None = None
        for url in urls:
            if samples := await self._samples(url):
                break
        return samples

    async def _samples(self, url: str) -> Samples | None:
        async with self._requests:
            body = await fetch(url)
        try:
            return None if body is None else parse(body.decode(), WANTED)
        except ValueError:
            return None

    async def _on_notice(self, payload: bytes) -> None:
        notice = decode_kv_notice(payload)
        if notice.wire_version != WIRE_VERSION:
            raise ProtocolError(unsupported(notice.wire_version))
        if self._roster.get(notice.lease_id) is not None:
            self._loads[notice.lease_id] = self._now(), notice.load

    async def _follow_links(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            match event:
                case Snapshot(entries):
                    self._links.clear()
                    for key, value in entries.items():
                        self._update_link(key, value)
                case Put(key, value):
                    self._update_link(key, value)
                case Delete(key):
                    self._links.pop(key, None)

    def _update_link(self, key: str, value: bytes) -> None:
        try:
            self._links[key] = decode_json(value, LinkRecord)
        except ProtocolError as exc:
            logger.warning("ignored a malformed link record at %s: %s", key, exc)
            self._on_drop("record")
            self._links.pop(key, None)


def _vllm_metrics_of(members: Iterable[EndpointRecord]) -> dict[str, list[str]]:
    """Maps source to the URLs where vLLM's metrics of each Frontend may be.

    vLLM's Rust frontend has them on the HTTP port only. A port that is shared by several Frontends
    does not say whose metrics it serves.
    """
    frontends = [member for member in members if member.component == "Frontend"]
    sharing = Counter(member.transport.stream for member in frontends)
    return {
        f"{member.lease_id}/vllm": [f"{member.status_url}{VLLM_METRICS}"]
        + [f"http://{port}/metrics" for port in [member.transport.stream] if sharing[port] == 1]
        for member in frontends
    }

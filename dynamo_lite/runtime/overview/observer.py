"""Observes a running graph: members and links in etcd, and each process's health and metrics.

It stores nothing and sends nothing but reads of etcd and GET requests to status servers.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_all, decode_json
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.records import EndpointRecord, LinkRecord
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.overview.compose import LATENCY_S, WANTED, compose, processes
from dynamo_lite.runtime.overview.fetch import TIMEOUT_S, fetch, fetch_health
from dynamo_lite.runtime.overview.metrics import CounterHistory, Samples, parse
from dynamo_lite.runtime.overview.model import Overview
from dynamo_lite.runtime.process.status import VLLM_METRICS
from dynamo_lite.runtime.store import Store

#: Most requests to status servers at a time.
_MAX_REQUESTS = 32


class Observer:
    """Async context manager; entering it waits for the first list of members.

    Raises StoreUnavailable without one. Rates and latencies cover the time between calls of
    `look`. wall: seconds since the epoch, for the ages of processes.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        on_drop: OnDrop = uncounted,
        wall: Callable[[], float] = time.time,
        certificates: Certificates | None = None,
    ):
        self._store, self._namespace, self._wall = store, namespace, wall
        self._certificates = certificates
        self._roster = Roster(store, names.components_prefix(namespace), on_drop)
        self._history = CounterHistory(LATENCY_S)
        self._requests = asyncio.Semaphore(_MAX_REQUESTS)
        #: Those of the last look, as in `CounterHistory`.
        self.pages: Mapping[str, Samples | None] = {}

    async def __aenter__(self) -> Self:
        await self._roster.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._roster.__aexit__()

    @property
    def members(self) -> Mapping[int, EndpointRecord]:
        """The main record of each live process, by its lease."""
        return processes(self._roster.members)

    async def look(self) -> Overview:
        """The graph now. Takes as long as the slowest process needs to respond, 1 s at most."""
        members = self.members
        urls = _metrics_of(members.values())
        facts, pages, links = await asyncio.gather(
            asyncio.gather(*(self._health(member.status_url) for member in members.values())),
            asyncio.gather(*map(self._samples, urls.values())),
            self._links(),
        )
        now = asyncio.get_running_loop().time()
        self.pages = dict(zip(urls, pages, strict=True))
        self._history.add(now, self.pages)
        return compose(
            self._wall(),
            self._namespace,
            members,
            dict(zip(members, facts, strict=True)),
            self._history,
            links or (),
            ["etcd does not respond: members may have left"] if links is None else (),
        )

    async def _health(self, url: str) -> dict[str, Any]:
        async with self._requests:
            return await fetch_health(url, self._certificates)

    async def _samples(self, urls: Sequence[str]) -> Samples | None:
        """Of the first page that has any; None without a page."""
        samples: Samples | None = None
        for url in urls:
            async with self._requests:
                body = await fetch(url, self._certificates)
            try:
                samples = None if body is None else parse(body.decode(), WANTED)
            except ValueError:
                samples = None
            if samples:
                break
        return samples

    async def _links(self) -> list[LinkRecord] | None:
        """Malformed ones are left out; None if the store does not respond."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                entries = await self._store.get_prefix(names.links_prefix(self._namespace))
        except (Unavailable, TimeoutError):
            return None
        return decode_all(entries, lambda value: decode_json(value, LinkRecord))


def _metrics_of(members: Iterable[EndpointRecord]) -> dict[str, list[str]]:
    """Maps source to the URLs where its metrics may be: a process's, and of a Frontend vLLM's.

    vLLM's Rust frontend has them on the HTTP port only. A port that is shared by several Frontends
    does not say whose metrics it serves.
    """
    members = list(members)
    found = {f"{member.lease_id}": [f"{member.status_url}/metrics"] for member in members}
    frontends = [member for member in members if member.component == "Frontend"]
    sharing = Counter(member.transport.stream for member in frontends)
    for member in frontends:
        port = member.transport.stream
        own = [f"http://{port}/metrics"] if sharing[port] == 1 else []
        found[f"{member.lease_id}/vllm"] = [f"{member.status_url}{VLLM_METRICS}", *own]
    return found

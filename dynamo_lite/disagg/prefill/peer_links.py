"""A prefill worker's ways to decode engines: each is tried before it is used.

Engines are met as soon as their metadata is in the store, so that no request pays for
the first contact. What was found is kept in the store under this worker's lease. A way
that failed is tried again after a while; one to an engine that does not fit is not.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from prometheus_client import Counter

from dynamo_lite.engine.base import LinkReport
from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json, encode_sealed
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    IncompatiblePeer,
    LeaseLost,
    StoreUnavailable,
    Unavailable,
)
from dynamo_lite.protocol.prefill import Listen
from dynamo_lite.protocol.records import EngineMetadata, LinkRecord
from dynamo_lite.runtime.process.host import Host
from dynamo_lite.runtime.store import Delete, Put, Snapshot, WatchEvent
from dynamo_lite.runtime.tasks import running
from dynamo_lite.transfer.directory import MetadataDirectory

logger = logging.getLogger(__name__)

#: A decode engine is asked to listen for so long, again and again, until it is over.
_LISTEN_S, _LISTEN_AGAIN_S = 3.0, 1.0
_ASK_S = 2.0
_STORE_PAUSE_S = 1.0
_BACKOFF = Backoff(first_s=1.0, longest_s=60.0)


class LinkTester(Protocol):
    """The part of a prefill engine that links need."""

    async def preflight(self, target: EngineMetadata) -> LinkReport: ...

    def forget(self, engine_ids: Sequence[str]) -> None: ...


class _PeerLink:
    """failure: of the last try. tested: it is known. recorded: the first try is over, and its
    record in the store. again: it is to be tried at once, or the engine has left (`gone`).
    broken: how many tries in a row found a broken way. final: it can never work."""

    def __init__(self, target: EngineMetadata):
        self.target = target
        self.failure: str | None = None
        self.tested, self.again = asyncio.Event(), asyncio.Event()
        self.recorded = asyncio.Event()
        self.gone = self.final = False
        self.broken = 0


class PeerLinks:
    """host: owns the tasks, and holds the records."""

    def __init__(self, host: Host, engine: LinkTester, directory: MetadataDirectory):
        self._host, self._engine, self._directory = host, engine, directory
        self._namespace, self._lease_id = host.spec.namespace, host.lease.id
        self._prefix = names.nixl_metadata_prefix(self._namespace)
        self._links: dict[str, _PeerLink] = {}
        self._listed = asyncio.Event()
        self._outcomes = Counter(
            "dynamo_lite_preflights",
            "Ways to decode engines that were tried, by outcome: ok, failed, incompatible",
            ["outcome"],
            registry=host.registry,
        )

    async def run(self) -> None:
        """Meets engines as they come. To be owned by the process."""
        async with self._host.store.watch(self._prefix) as events:
            async for event in events:
                await self._apply(event)
                self._listed.set()

    async def first_tries(self, timeout_s: float) -> list[str]:
        """Waits until the way to each engine that is there now has been tried, and what was
        found is in the store. Returns the engines of which that was not so in time."""
        waited: list[_PeerLink] = []
        try:
            async with asyncio.timeout(timeout_s):
                await self._listed.wait()
                waited = list(self._links.values())
                for link in waited:
                    await link.recorded.wait()
        except TimeoutError:
            if not self._listed.is_set():
                logger.warning("decode engines were not listed within %g s", timeout_s)
        return [link.target.engine_id for link in waited if not link.recorded.is_set()]

    @property
    def hopeless(self) -> bool:
        """Whether there are decode engines, and none that can be given KV."""
        links = self._links.values()
        return bool(links) and all(link.tested.is_set() and link.failure for link in links)

    async def usable(self, target: EngineMetadata) -> str | None:
        """Why `target` cannot be given KV; waits for the first try of the way there."""
        link = self._meet(target)
        await link.tested.wait()
        return link.failure

    def doubt(self, engine_id: str) -> None:
        """A write into it has failed: the way is tried before it is used again."""
        link = self._links.get(engine_id)
        if link is not None and link.tested.is_set() and link.failure is None:
            link.tested.clear()
            link.again.set()

    def forget_leases(self, lease_ids: frozenset[int]) -> None:
        """These decode workers left."""
        for engine_id, link in list(self._links.items()):
            if link.target.lease_id in lease_ids:
                self._forget(engine_id)

    async def _apply(self, event: WatchEvent) -> None:
        match event:
            case Snapshot(entries, lost_data):
                listed = {key.removeprefix(self._prefix): value for key, value in entries.items()}
                for engine_id in [] if lost_data else self._links.keys() - listed.keys():
                    self._vanished(engine_id)
                for engine_id, value in sorted(listed.items()):
                    await self._learn(engine_id, value)
            case Put(key, value):
                await self._learn(key.removeprefix(self._prefix), value)
            case Delete(key):
                self._vanished(key.removeprefix(self._prefix))

    async def _learn(self, engine_id: str, value: bytes) -> None:
        if engine_id in self._links:
            return
        try:
            self._directory.learn(engine_id, value)
            target = await self._directory.get(engine_id)
        except DynamoLiteError as exc:
            logger.warning("engine %s: %s", engine_id, exc)
            return
        if target is not None:
            self._meet(target)

    def _meet(self, target: EngineMetadata) -> _PeerLink:
        link = self._links.get(target.engine_id)
        if link is None:
            link = self._links[target.engine_id] = _PeerLink(target)
            self._host.spawn(self._keep(link), f"link {target.engine_id}")
        return link

    def _vanished(self, engine_id: str) -> None:
        if (link := self._links.get(engine_id)) is not None:
            leases = frozenset({link.target.lease_id})
            self._engine.forget(self._directory.forget_leases(leases))
            self._forget(engine_id)

    def _forget(self, engine_id: str) -> None:
        if (link := self._links.pop(engine_id, None)) is not None:
            link.gone = True
            link.again.set()

    async def _keep(self, link: _PeerLink) -> None:
        """From the first try until the engine has left."""
        while not link.gone:
            link.again.clear()
            report = await self._try(link)
            link.failure = report.failure
            link.tested.set()
            await self._record(link, report)
            link.recorded.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_pause_s(link)):
                    await link.again.wait()
        link.failure = link.failure or "the engine has left"
        link.tested.set()
        link.recorded.set()
        await self._host.release(self._key(link))

    async def _try(self, link: _PeerLink) -> LinkReport:
        target, outcome = link.target, "failed"
        try:
            async with self._listening(target.engine_id):
                report = await self._engine.preflight(target)
            link.broken = 0 if report.failure is None else link.broken + 1
            outcome = "ok" if report.failure is None else "failed"
        except IncompatiblePeer as exc:
            link.final, outcome = True, "incompatible"
            report = LinkReport(exc.detail)
        except DynamoLiteError as exc:
            report = LinkReport(str(exc))
        self._outcomes.labels(outcome).inc()
        if report.failure is not None and not link.gone:
            logger.warning("engine %s is given no KV: %s", target.engine_id, report.failure)
        return report

    @contextlib.asynccontextmanager
    async def _listening(self, engine_id: str) -> AsyncIterator[None]:
        """Meanwhile the engine makes steps, though it may be idle. Raises Unavailable,
        DeadlineExceeded."""
        await self._ask_to_listen(engine_id, _LISTEN_S)
        try:
            async with running(self._keep_listening(engine_id), name=f"listen {engine_id}"):
                yield
        finally:
            with contextlib.suppress(Unavailable, DeadlineExceeded):
                await self._ask_to_listen(engine_id, 0)

    async def _keep_listening(self, engine_id: str) -> None:
        while True:
            await asyncio.sleep(_LISTEN_AGAIN_S)
            with contextlib.suppress(Unavailable, DeadlineExceeded):
                await self._ask_to_listen(engine_id, _LISTEN_S)

    async def _ask_to_listen(self, engine_id: str, for_s: float) -> None:
        listen = Listen(writer_lease_id=self._lease_id, for_s=for_s)
        subject = names.listen_subject(self._namespace, engine_id)
        await self._host.messaging.request(subject, encode_sealed(listen), timeout_s=_ASK_S)

    async def _record(self, link: _PeerLink, report: LinkReport) -> None:
        """Without a store it is told later, unless there is something newer then."""
        record = LinkRecord(
            prefill_lease_id=self._lease_id,
            engine_id=link.target.engine_id,
            decode_lease_id=link.target.lease_id,
            ok=report.failure is None,
            detail=report.failure or "",
            lanes=report.lanes,
            contact_s=report.contact_s,
            round_trip_s=report.round_trip_s,
            checked_at=self._host.clock.wall(),
        )
        while not link.again.is_set():
            try:
                await self._host.hold(self._key(link), encode_json(record), within_s=0.0)
                return
            except StoreUnavailable as exc:
                logger.debug("link %s not recorded: %s", self._key(link), exc)
            except LeaseLost:
                return  # the process is on its way out
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STORE_PAUSE_S):
                    await link.again.wait()

    def _key(self, link: _PeerLink) -> str:
        return names.link_key(self._namespace, self._lease_id, link.target.engine_id)


def _pause_s(link: _PeerLink) -> float | None:
    """Until the next try; None: there is none. What was only not heard, for NATS may be
    away, is tried again soon."""
    if link.final or link.failure is None:
        return None
    return _BACKOFF.after_exit(max(0, link.broken - 1), 0.0).delay_s

"""A prefill worker's links to decode engines: each is tested before it is used.

A link is tested as soon as the engine's metadata is in the store, so that no request waits
for the first contact. The result is kept in the store under this worker's lease. A failed
link is tested again with a growing delay; a link to an incompatible engine is not.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from prometheus_client import Counter

from dynamo_lite.engine.base import LinkReport, PrefillEngine
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
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.store import Delete, Put, Snapshot, WatchEvent
from dynamo_lite.runtime.tasks import running
from dynamo_lite.transfer.directory import MetadataDirectory

logger = logging.getLogger(__name__)

#: How long a decode engine is asked to listen during a test, and how often.
_LISTEN_S, _LISTEN_AGAIN_S = 3.0, 1.0
_ASK_S = 2.0
_STORE_PAUSE_S = 1.0
_BACKOFF = Backoff(first_s=1.0, longest_s=60.0)


class _PeerLink:
    """The link to one decode engine."""

    def __init__(self, target: EngineMetadata):
        self.target = target
        #: Result of the last test, valid while `tested` is set; None if the link is usable.
        self.failure: str | None = None
        self.tested = asyncio.Event()
        #: Set when the result of the first test is in the store.
        self.recorded = asyncio.Event()
        #: Set to test at once, or when the engine has left.
        self.again = asyncio.Event()
        #: Whether the engine has left.
        self.gone = False
        #: Whether the engine is incompatible: it is not tested again.
        self.final = False
        #: Tests in a row that failed in the engine, for the delay before the next one.
        self.broken = 0


class PeerLinks:
    """host: runs the tasks and holds the link records in the store. backoff: between the tests of
    a link that fails in the engine. store_pause_s: between the tries to record a result."""

    def __init__(
        self,
        host: Host,
        engine: PrefillEngine,
        directory: MetadataDirectory,
        *,
        backoff: Backoff = _BACKOFF,
        store_pause_s: float = _STORE_PAUSE_S,
    ):
        self._backoff, self._store_pause_s = backoff, store_pause_s
        self._host, self._engine, self._directory = host, engine, directory
        self._namespace, self._lease_id = host.spec.namespace, host.lease.id
        self._prefix = names.nixl_metadata_prefix(self._namespace)
        self._links: dict[str, _PeerLink] = {}
        self._listed = asyncio.Event()
        self._outcomes = Counter(
            "dynamo_lite_preflights",
            "Link tests to decode engines, by outcome: ok, failed, incompatible",
            ["outcome"],
            registry=host.registry,
        )

    async def run(self) -> None:
        """Follows the engines in the store. A task of the process."""
        async with self._host.store.watch(self._prefix) as events:
            async for event in events:
                await self._apply(event)
                self._listed.set()

    async def first_tries(self, timeout_s: float) -> list[str]:
        """Waits until the links to all present engines are tested and recorded in the store.

        Returns the engines for which the timeout was too short.
        """
        waited: list[_PeerLink] = []
        try:
            async with asyncio.timeout(timeout_s):
                await self._listed.wait()
                waited = list(self._links.values())
                for link in waited:
                    await link.recorded.wait()
        except TimeoutError:
            if not self._listed.is_set():
                logger.warning(
                    "timeout: the store did not list decode engines within %g s", timeout_s
                )
        return [link.target.engine_id for link in waited if not link.recorded.is_set()]

    @property
    def hopeless(self) -> bool:
        """Whether there are decode engines, but no usable link to any."""
        links = self._links.values()
        return bool(links) and all(link.tested.is_set() and link.failure for link in links)

    async def usable(self, target: EngineMetadata) -> str | None:
        """Returns why the link to `target` is not usable, or None. Waits for its test."""
        link = self._open(target)
        await link.tested.wait()
        return link.failure

    def retest(self, engine_id: str) -> None:
        """A write to this engine has failed: tests its link before it is used again."""
        link = self._links.get(engine_id)
        if link is not None and link.tested.is_set() and link.failure is None:
            link.tested.clear()
            link.again.set()

    def forget_leases(self, lease_ids: frozenset[int]) -> None:
        """Forgets the links to these decode workers, which have left."""
        for engine_id, link in list(self._links.items()):
            if link.target.lease_id in lease_ids:
                self._forget(engine_id)

    async def _apply(self, event: WatchEvent) -> None:
        match event:
            case Snapshot(entries, lost_data):
                listed = {key.removeprefix(self._prefix): value for key, value in entries.items()}
                for engine_id in [] if lost_data else self._links.keys() - listed.keys():
                    self._deleted(engine_id)
                for engine_id, value in sorted(listed.items()):
                    await self._add(engine_id, value)
            case Put(key, value):
                await self._add(key.removeprefix(self._prefix), value)
            case Delete(key):
                self._deleted(key.removeprefix(self._prefix))

    async def _add(self, engine_id: str, value: bytes) -> None:
        if engine_id in self._links:
            return
        try:
            self._directory.learn(engine_id, value)
            target = await self._directory.get(engine_id)
        except DynamoLiteError as exc:
            logger.warning("engine %s: %s", engine_id, exc)
            return
        if target is not None:
            self._open(target)

    def _open(self, target: EngineMetadata) -> _PeerLink:
        link = self._links.get(target.engine_id)
        if link is None:
            link = self._links[target.engine_id] = _PeerLink(target)
            self._host.spawn(self._keep_tested(link), f"link {target.engine_id}")
        return link

    def _deleted(self, engine_id: str) -> None:
        if (link := self._links.get(engine_id)) is not None:
            leases = frozenset({link.target.lease_id})
            self._engine.forget(self._directory.forget_leases(leases))
            self._forget(engine_id)

    def _forget(self, engine_id: str) -> None:
        if (link := self._links.pop(engine_id, None)) is not None:
            link.gone = True
            link.again.set()

    async def _keep_tested(self, link: _PeerLink) -> None:
        """Runs from the first test until the engine has left."""
        while not link.gone:
            link.again.clear()
            report = await self._test(link)
            link.failure = report.failure
            link.tested.set()
            await self._record(link, report)
            link.recorded.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(link)):
                    await link.again.wait()
        link.failure = link.failure or "the engine has left"
        link.tested.set()
        link.recorded.set()
        # An engine whose worker came back meanwhile has a new link, with the record of that.
        if link.target.engine_id not in self._links:
            await self._host.keys.release(self._key(link))

    async def _test(self, link: _PeerLink) -> LinkReport:
        target, outcome = link.target, "failed"
        try:
            async with self._listening(target.engine_id):
                report = await self._engine.test_link(target)
            link.broken = 0 if report.failure is None else link.broken + 1
            outcome = "ok" if report.failure is None else "failed"
        except IncompatiblePeer as exc:
            link.final, outcome = True, "incompatible"
            report = LinkReport(exc.detail)
        except DynamoLiteError as exc:
            report = LinkReport(str(exc))
        self._outcomes.labels(outcome).inc()
        if report.failure is not None and not link.gone:
            logger.warning("link to engine %s is not usable: %s", target.engine_id, report.failure)
        return report

    @contextlib.asynccontextmanager
    async def _listening(self, engine_id: str) -> AsyncIterator[None]:
        """Keeps the engine making steps, even if it is idle. Raises Unavailable or
        DeadlineExceeded."""
        await self._ask_to_listen(engine_id, _LISTEN_S)
        try:
            async with running(self._repeat_listen(engine_id), name=f"listen {engine_id}"):
                yield
        finally:
            with contextlib.suppress(Unavailable, DeadlineExceeded):
                await self._ask_to_listen(engine_id, 0)

    async def _repeat_listen(self, engine_id: str) -> None:
        while True:
            await asyncio.sleep(_LISTEN_AGAIN_S)
            with contextlib.suppress(Unavailable, DeadlineExceeded):
                await self._ask_to_listen(engine_id, _LISTEN_S)

    async def _ask_to_listen(self, engine_id: str, for_s: float) -> None:
        listen = Listen(writer_lease_id=self._lease_id, for_s=for_s)
        subject = names.listen_subject(self._namespace, engine_id)
        await self._host.messaging.request(subject, encode_sealed(listen), timeout_s=_ASK_S)

    async def _record(self, link: _PeerLink, report: LinkReport) -> None:
        """Retries while the store is unavailable, until there is a newer result."""
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
                await self._host.keys.hold(self._key(link), encode_json(record), within_s=0.0)
                return
            except StoreUnavailable as exc:
                logger.debug("could not record link %s, will retry: %s", self._key(link), exc)
            except LeaseLost:
                return  # the process is shutting down
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._store_pause_s):
                    await link.again.wait()

    def _key(self, link: _PeerLink) -> str:
        return names.link_key(self._namespace, self._lease_id, link.target.engine_id)

    def _pause_s(self, link: _PeerLink) -> float | None:
        """Delay before the next test; None: no further test. A test without an answer (NATS may be
        disconnected) does not count as broken and is repeated soon."""
        if link.final or link.failure is None:
            return None
        return self._backoff.after_exit(max(0, link.broken - 1), 0.0).delay_s

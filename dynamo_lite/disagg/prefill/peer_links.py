"""A prefill worker's links to decode engines: which of them it does not use, and why.

A link is used until a transfer over it fails. Then it is *marked* for a while, and jobs for its
engine are left to other workers. The next job after that is the try: success ends the series of
failures, another failure marks the link for longer. The link to an engine that does not fit is
marked for good, before any job. A mark is kept in the store under this worker's lease, so that
the decode engine does not count on this worker.
"""

import asyncio
import contextlib
import logging
import math

from dynamo_lite.disagg.engine import PrefillEngine
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import IncompatiblePeer, LeaseLost, ProtocolError
from dynamo_lite.protocol.kv_regions import decode_engine
from dynamo_lite.protocol.records import EngineMetadata, LinkRecord
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.store import WatchEvent, changes

logger = logging.getLogger(__name__)

_BACKOFF = Backoff(first_s=1.0, longest_s=60.0)


class PeerLink:
    """The link to one decode engine."""

    def __init__(self, target: EngineMetadata):
        self.target = target
        #: KV groups of its model.
        self.groups = target.num_groups
        #: Whether its blocks can also be read.
        self.reads = False
        #: Why it is not used; empty: it is used.
        self.mark = ""
        self.fits = True
        #: Failures in a row.
        self.failures = 0
        #: Set when the engine has left.
        self.gone = asyncio.Event()


class PeerLinks:
    """host: runs the tasks and holds the marks in the store."""

    def __init__(
        self,
        host: Host,
        engine: PrefillEngine,
        *,
        backoff: Backoff = _BACKOFF,
    ):
        self._host, self._engine = host, engine
        self._backoff, self._prefix = backoff, names.nixl_metadata_prefix(host.spec.namespace)
        #: By decode engine, as long as the store has its record. An engine's id is that of one
        #: incarnation, so a worker that restarted at the same address is another one.
        self.known: dict[str, PeerLink] = {}
        #: The misfit that was reported last.
        self._reported = ""

    async def run(self) -> None:
        """Follows the engines in the store. A task of the process."""
        async with self._host.store.watch(self._prefix) as events:
            async for event in events:
                self._apply(event)
                self._report_misfit()

    @property
    def hopeless(self) -> bool:
        """Whether there are decode engines, but no usable link to any."""
        return bool(self.known) and all(link.mark for link in self.known.values())

    @property
    def misfit(self) -> str:
        """Why it fits none of the decode engines; empty if it fits one, or there is none."""
        if any(link.fits for link in self.known.values()):
            return ""
        return next((link.mark for link in self.known.values()), "")

    async def look_up(self, engine_id: str) -> PeerLink | None:
        """The link to an engine that is not in `known`: its first job may come before the event of
        its record. None if the store has no record of it.

        Raises StoreUnavailable, ProtocolError.
        """
        raw = await self._host.store.get(f"{self._prefix}{engine_id}")
        return None if raw is None else self._made(engine_id, raw)

    def broke(self, engine_id: str, why: str) -> None:
        """A transfer with this engine has failed, or the first contact with it."""
        link = self.known.get(engine_id)
        if link is not None and not link.mark:  # several transfers may fail together
            link.failures, pause_s = self._backoff.after_exit(link.failures)
            self._mark(link, why, pause_s)

    def _apply(self, event: WatchEvent) -> None:
        known = [f"{self._prefix}{engine_id}" for engine_id in self.known]
        for key, value in changes(event, known).items():
            engine_id = key.removeprefix(self._prefix)
            if value is not None:
                self._add(engine_id, value)
            elif (link := self.known.pop(engine_id, None)) is not None:
                link.gone.set()  # if the store has lost the record, its engine puts it again

    def _add(self, engine_id: str, value: bytes) -> None:
        if engine_id in self.known:
            return
        try:
            link = self._made(engine_id, value)
        except ProtocolError as exc:
            logger.warning("engine %s: %s", engine_id, exc)
            return
        self.known[engine_id] = link
        if not link.fits:
            self._mark(link, link.mark, None)

    def _made(self, engine_id: str, raw: bytes) -> PeerLink:
        """Raises ProtocolError."""
        try:
            target = decode_engine(raw)
            if target.engine_id != engine_id:
                raise ProtocolError(
                    f"record of engine {engine_id} names another engine, {target.engine_id}"
                )
        except ProtocolError:
            self._host.drops("engine_metadata")
            raise
        link = PeerLink(target)
        try:
            link.reads = self._engine.check_peer(target)
        except IncompatiblePeer as exc:
            link.fits, link.mark = False, exc.detail
        return link

    def _report_misfit(self) -> None:
        if (why := self.misfit) != self._reported:
            self._reported = why
            if why:
                self._host.progress(f"unfit for every decode worker, so it gets no jobs: {why}")
            elif self.known:
                self._host.progress("fits a decode worker")

    def _mark(self, link: PeerLink, why: str, for_s: float | None) -> None:
        """for_s: None for as long as the engine lives."""
        link.mark = why
        how_long = "never" if for_s is None else f"again in {for_s:g} s"
        logger.warning("link to engine %s: used %s: %s", link.target.engine_id, how_long, why)
        self._host.spawn(self._keep_marked(link, for_s), f"link {link.target.engine_id}")

    async def _keep_marked(self, link: PeerLink, for_s: float | None) -> None:
        host, target = self._host, link.target
        key = names.link_key(host.spec.namespace, host.lease.id, target.engine_id)
        record = LinkRecord(
            prefill_lease_id=host.lease.id,
            engine_id=target.engine_id,
            decode_lease_id=target.lease_id,
            detail=link.mark,
            next_try=None if for_s is None else host.clock.wall() + for_s,
        )
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(for_s):
                    await host.keys.hold(key, encode_json(record), within_s=math.inf)
                    await link.gone.wait()
        except LeaseLost:
            return  # the process is shutting down
        link.mark = ""
        # A worker that came back meanwhile has a new link to the same engine.
        now = self.known.get(target.engine_id)
        if now is None or not now.mark:
            await host.keys.release(key)

"""Which prefill workers do not use their links to this decode engine, as they say themselves.

Owns the failed links to one engine. A prefill worker stores a `LinkRecord` of each link that
it does not use, under its lease (`disagg/prefill/peer_links.py`).
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.records import LinkRecord
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.members.roster import Members
from dynamo_lite.runtime.store import Delete, Put, Snapshot, Store, WatchEvent, first_event
from dynamo_lite.runtime.tasks import OnFailure, log_failure, running

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0


class WriterLinks:
    """Use `follow()` as a context. Without it no failed links are known.

    Changed on the bridge's thread, read on any thread.
    """

    def __init__(self, namespace: str, engine_id: str, on_drop: OnDrop = uncounted):
        self._namespace, self._engine_id, self._on_drop = namespace, engine_id, on_drop
        #: Why a link failed, by the prefill worker's lease id.
        self._failed: dict[int, str] = {}
        self._warned = False
        self._limit = LogLimit(_LOG_EVERY_S)

    def __repr__(self) -> str:
        return f"WriterLinks({self._engine_id!r}, failed={sorted(self._failed)})"

    def trouble(self, lease_id: int) -> str:
        """Why this prefill worker cannot write here; empty if its link has not failed."""
        return self._failed.get(lease_id, "")

    def usable(self, members: Members) -> Members:
        """The members without a failed link."""
        return tuple(member for member in members if not self.trouble(member.lease_id))

    def forget(self, lease_ids: frozenset[int]) -> None:
        """These prefill workers have left."""
        for lease_id in lease_ids:
            self._failed.pop(lease_id, None)

    def warn_if_none_usable(self, members: Members) -> None:
        """Logs when live prefill workers exist and none is usable, and when that ends."""
        usable = self.usable(members)
        none = bool(members) and not usable
        if none == self._warned:
            return
        if none and self._limit.allow() is not None:
            self._warned = True
            logger.warning(
                "long prompts are computed locally: the links of all %d live prefill workers to"
                " this engine have failed; link of worker %x: %s (`dynamo-lite ps --links` lists"
                " all links)",
                len(members),
                members[0].lease_id,
                self.trouble(members[0].lease_id),
            )
        elif not none:
            self._warned = False
            logger.info("%d live prefill workers, %d usable", len(members), len(usable))

    @contextlib.asynccontextmanager
    async def follow(
        self, store: Store, on_change: Callable[[], None], on_failure: OnFailure = log_failure
    ) -> AsyncIterator[None]:
        """Waits for the first listing. on_change: called from the event loop when a link has
        failed or has recovered. Raises StoreUnavailable."""
        prefix = names.links_prefix(self._namespace)
        async with store.watch(prefix) as events:
            self._apply(await first_event(events, prefix))
            following = self._follow(events, on_change)
            async with running(following, name="writer-links", on_failure=on_failure):
                yield

    async def _follow(
        self, events: AsyncIterator[WatchEvent], on_change: Callable[[], None]
    ) -> None:
        async for event in events:
            before = dict(self._failed)
            self._apply(event)
            if self._failed != before:
                on_change()

    def _apply(self, event: WatchEvent) -> None:
        match event:
            case Snapshot(entries):
                self._failed.clear()
                for key, value in entries.items():
                    self._apply_record(key, value)
            case Put(key, value):
                self._apply_record(key, value)
            case Delete(key):
                if (lease_id := self._writer(key)) is not None:
                    self._failed.pop(lease_id, None)

    def _apply_record(self, key: str, value: bytes) -> None:
        if (lease_id := self._writer(key)) is None:
            return
        try:
            record = decode_json(value, LinkRecord)
            if key != names.link_key(self._namespace, record.prefill_lease_id, record.engine_id):
                raise ProtocolError("the record names another key")
        except ProtocolError as exc:
            logger.warning("ignored an invalid link record at %s: %s", key, exc)
            self._on_drop("record")
            self._failed.pop(lease_id, None)
            return
        self._failed[lease_id] = record.detail

    def _writer(self, key: str) -> int | None:
        """The prefill worker's lease id; None for a link to another engine."""
        link = key.removeprefix(names.links_prefix(self._namespace))
        hex_lease, _, engine_id = link.partition(":")
        if engine_id != self._engine_id:
            return None
        try:
            return int(hex_lease, 16)
        except ValueError:
            return None

"""The target record: each order of a planner gets its version here, by compare-and-swap."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ProtocolError, Unavailable
from dynamo_lite.protocol.planner import Change, TargetRecord
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.store import Store

logger = logging.getLogger(__name__)


class Target:
    """by: who writes, for display."""

    def __init__(self, store: Store, namespace: str, by: str, clock: Clock):
        self._store, self._by, self._clock = store, by, clock
        self._key = names.planner_target_key(namespace)

    async def next_version(
        self, above: int, component: str, count: int, reason: str, up: bool | None
    ) -> int:
        """Records `count` as wanted, and returns the version of the order.

        above: the highest version that is known elsewhere. up: the direction of the change; None
        for a repeated order. Raises Unavailable when another writer was faster.
        """
        old, record = await self._read()
        changes = dict(record.changes)
        if up is not None:
            changes[component] = Change(up=up, at=self._clock.wall())
        version = max(record.version, above) + 1
        counts = {**record.counts, component: count}
        await self._put(
            old, record, version=version, counts=counts, reason=reason[:1024], changes=changes
        )
        return version

    async def reached(self, manual: Mapping[str, int]) -> None:
        """These numbers of an operator are reached. Raises Unavailable."""
        old, record = await self._read()
        left = {c: n for c, n in record.manual.items() if manual.get(c) != n}
        if old is not None and left != record.manual:
            version = record.version + 1
            await self._swap(old, msgspec.structs.replace(record, version=version, manual=left))

    async def set_manual(self, manual: Mapping[str, int], reason: str) -> TargetRecord:
        """An operator wants these numbers. Raises Unavailable when another writer was faster."""
        old, record = await self._read()
        counts, wanted = {**record.counts, **manual}, {**record.manual, **manual}
        return await self._put(old, record, counts=counts, reason=reason, manual=wanted)

    async def unset(self, components: Collection[str]) -> TargetRecord:
        """The planner decides about these again. Raises Unavailable when another writer was
        faster."""
        old, record = await self._read()
        left = {c: n for c, n in record.manual.items() if c not in components}
        if left == record.manual:
            return record
        return await self._put(old, record, reason="unset by an operator", manual=left)

    async def _read(self) -> tuple[bytes | None, TargetRecord]:
        """A record that cannot be read is replaced."""
        old = await self._store.get(self._key)
        try:
            if old is not None:
                return old, decode_json(old, TargetRecord)
        except ProtocolError as exc:
            logger.warning("%s is replaced: %s", self._key, exc)
        return old, TargetRecord(counts={}, version=0, by="", reason="")

    async def _put(self, old: bytes | None, record: TargetRecord, **changes: Any) -> TargetRecord:
        """Writes `record` with these changes, as this process's and of now."""
        changes = {"version": record.version + 1, **changes}
        new = msgspec.structs.replace(record, by=self._by, at=self._clock.wall(), **changes)
        await self._swap(old, new)
        return new

    async def _swap(self, old: bytes | None, new: TargetRecord) -> None:
        if not await self._store.swap(self._key, old, encode_json(new)):
            raise Unavailable(f"{self._key} was changed by another process meanwhile")

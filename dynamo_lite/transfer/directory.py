"""Metadata of decode engines, cached while they live.

It is added when an engine registers, or loaded from the store at the first job for it, and
dropped when the engine leaves. The key is the engine's incarnation, so stale metadata is
never used for a worker that restarted at the same address.
"""

import asyncio

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.records import EngineMetadata, decode_engine
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.store import Store


class MetadataDirectory:
    def __init__(self, store: Store, namespace: str, on_drop: OnDrop = uncounted):
        self._store, self._namespace, self._on_drop = store, namespace, on_drop
        self._known: dict[str, EngineMetadata] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self._loads = 0
        #: Leases of workers that left while a load was in flight.
        self._left_meanwhile: set[int] = set()

    async def get(self, engine_id: str) -> EngineMetadata | None:
        """Returns None if the engine has left. Raises StoreUnavailable, ProtocolError."""
        if (known := self._known.get(engine_id)) is not None:
            return known
        if not names.is_engine_id(engine_id):
            return None
        lock = self._loading.setdefault(engine_id, asyncio.Lock())
        self._loads += 1
        try:
            async with lock:
                return self._known.get(engine_id) or await self._load(engine_id)
        finally:
            self._loading.pop(engine_id, None)
            self._loads -= 1
            if not self._loads:
                self._left_meanwhile.clear()

    def learn(self, engine_id: str, raw: bytes) -> EngineMetadata:
        """Adds an engine's metadata, and returns it. raw: its record in the store. Raises
        ProtocolError."""
        known = self._known.get(engine_id)
        if known is None:
            known = self._known[engine_id] = self._decode(engine_id, raw)
        return known

    def forget_leases(self, lease_ids: frozenset[int]) -> list[str]:
        """Drops the engines of workers that left. Returns their engine ids."""
        if self._loads:
            self._left_meanwhile |= lease_ids
        gone = [e for e, m in self._known.items() if m.lease_id in lease_ids]
        for engine_id in gone:
            del self._known[engine_id]
        return gone

    async def _load(self, engine_id: str) -> EngineMetadata | None:
        raw = await self._store.get(names.nixl_metadata_key(self._namespace, engine_id))
        if raw is None:
            return None
        metadata = self._decode(engine_id, raw)
        if metadata.lease_id in self._left_meanwhile:
            return None
        self._known[engine_id] = metadata
        return metadata

    def _decode(self, engine_id: str, raw: bytes) -> EngineMetadata:
        try:
            metadata = decode_engine(raw)
            if metadata.engine_id != engine_id:
                raise ProtocolError(
                    f"record of engine {engine_id} names another engine, {metadata.engine_id}"
                )
        except ProtocolError:
            self._on_drop("engine_metadata")
            raise
        return metadata

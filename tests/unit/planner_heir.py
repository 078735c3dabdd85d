"""A planner of a graph with a secret that only watches: what it would resume if it led."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from dynamo_lite.planner.authentic import AuthenticRecords
from dynamo_lite.planner.records import PlannerRecords
from dynamo_lite.planner.target import Target
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.planner import PauseRecord
from dynamo_lite.runtime.clock import SYSTEM_CLOCK
from dynamo_lite.runtime.drops import uncounted
from dynamo_lite.runtime.sealed_records import RecordSeals
from dynamo_lite.runtime.store import Store
from tests.builders import eventually


class Heir:
    def __init__(self, store: Store, seals: RecordSeals):
        self._store, self._seals = store, seals
        self.records = AuthenticRecords(seals)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        host: Any = SimpleNamespace(
            store=self._store, spec=SimpleNamespace(namespace="n"), drops=uncounted
        )
        async with PlannerRecords(host, self.records, elects=False) as self._watched:
            yield

    async def set_by_operator(self, **manual: int) -> None:
        """Another process writes a target record."""
        records = AuthenticRecords(self._seals)
        target = Target(self._store, "n", "an operator", SYSTEM_CLOCK, records)
        await target.set_manual(manual, "a test")

    async def catch_up(self) -> None:
        """Until it has seen everything that was stored."""
        key = names.planner_pause_key("n")
        pause = encode_json(PauseRecord(by="a test", reason="the last record"))
        await self._store.put(key, self._seals.sealed(key, pause))
        await eventually(lambda: self._watched.paused)

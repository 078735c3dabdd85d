"""The changes that are under way, their records in etcd, and how those before have ended."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from dynamo_lite.planner.departure import Departure
from dynamo_lite.planner.policy.inputs import Operation
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.planner import ChangePhase, OperationRecord
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.store import Store

logger = logging.getLogger(__name__)

#: How the start of a worker ends without one.
_FAILED_STARTS = ("failed", "withdrawn", "refused")
#: How long a change is resumed whose first order may not have been given.
_ORDERED_S = 300.0


@dataclass
class RunningOperation:
    record: OperationRecord
    #: Monotonic; when this process resumed it, if another one began it.
    began: float
    #: Whether etcd has this record for sure.
    stored: bool = False
    #: Failed steps in a row, and when the next one may be tried, monotonic.
    failures: int = 0
    retry_at: float = 0.0
    departure: Departure | None = None


class UnderWay:
    """The additions and removals that this planner has to complete while it leads."""

    def __init__(self, store: Store, namespace: str, clock: Clock, on_drop: OnDrop = uncounted):
        self._store, self._namespace, self._clock = store, namespace, clock
        self._on_drop = on_drop
        self._running: dict[int, RunningOperation] = {}
        #: How operations have ended: (component, kind, outcome) to their number.
        self.ended: Counter[tuple[str, str, str]] = Counter()
        #: Leases that the connector does not know.
        self.foreign: set[int] = set()
        self._removed: set[int] = set()

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningOperation]:
        """Oldest first; they may end meanwhile."""
        return iter(list(self._running.values()))

    async def load(self) -> None:
        """Takes over what other planners have left. Raises StoreUnavailable."""
        entries = await self._store.get_prefix(names.planner_operations_prefix(self._namespace))
        now = self._clock.monotonic()
        self._running.clear()
        for key, value in entries.items():
            try:
                record = decode_json(value, OperationRecord)
            except ProtocolError as exc:
                logger.warning("%s is ignored: %s", key, exc)
                self._on_drop("record")
                continue
            if record.phase == "ordered" and self._clock.wall() - record.at > _ORDERED_S:
                # The load was another one then, and the planner does not wait for it.
                logger.warning("%s is dropped: it is too old", record)
                await self._store.delete(key)
                continue
            self._running[record.id] = RunningOperation(record, began=now, stored=True)
            logger.info("resumes %s", record)

    def forget(self) -> None:
        """Another planner leads."""
        self._running.clear()

    def of(self, component: str) -> tuple[Operation, ...]:
        now = self._clock.monotonic()
        return tuple(
            Operation(
                id=one.record.id,
                kind=one.record.kind,
                age_s=now - one.began,
                confirmed=one.record.phase != "ordered",
                withdrawing=one.record.phase == "withdrawing",
            )
            for one in self._running.values()
            if one.record.component == component
        )

    def leaving(self, component: str) -> int:
        """Workers that drain before the connector gets its order."""
        phases = [o.record.phase for o in self._running.values() if o.record.component == component]
        return phases.count("leaving")

    def asked_to_leave(self, component: str) -> int:
        """Workers whose removal the connector was asked for, and which may still be counted."""
        return self._removals(component, "asked")

    def to_be_ordered(self, component: str) -> int:
        """Removals whose workers the connector's numbers still contain."""
        return self._removals(component, "ordered", "leaving")

    def _removals(self, component: str, *phases: ChangePhase) -> int:
        records = (one.record for one in self._running.values())
        return sum(
            (record.component, record.kind) == (component, "remove") and record.phase in phases
            for record in records
        )

    def victims(self, live: Iterable[int]) -> set[int]:
        """Leases of workers that are being removed, or were and are still registered.

        live: the leases of all registered workers.
        """
        self._removed &= set(live)
        return self._removed | {one.record.lease_id for one in self._running.values()}

    def starts(self, component: str) -> tuple[int, int]:
        """How many have succeeded and failed."""
        return (
            self.ended[component, "add", "done"],
            sum(self.ended[component, "add", outcome] for outcome in _FAILED_STARTS),
        )

    # Changes

    def begins(self, record: OperationRecord) -> RunningOperation:
        """Its record is stored by `enter`."""
        self._running[record.id] = one = RunningOperation(record, began=self._clock.monotonic())
        return one

    def get(self, operation: int) -> RunningOperation | None:
        return self._running.get(operation)

    async def enter(self, one: RunningOperation, phase: ChangePhase) -> None:
        """Stores its record with this phase. After StoreUnavailable etcd may have it or not."""
        one.record, one.stored = msgspec.structs.replace(one.record, phase=phase), False
        await self._store.put(self._key(one.record), encode_json(one.record))
        one.stored = True
        one.failures = 0

    async def end(self, one: RunningOperation, outcome: str) -> None:
        """Raises StoreUnavailable; it goes on then."""
        await self._store.delete(self._key(one.record))
        self._running.pop(one.record.id, None)
        if one.record.kind == "remove" and outcome != "refused":
            self._removed.add(one.record.lease_id)
        self.ended[one.record.component, one.record.kind, outcome] += 1
        what = f"{one.record.kind} {one.record.component}"
        logger.info("%s: %s", what, outcome)

    def _key(self, record: OperationRecord) -> str:
        return names.planner_operation_key(self._namespace, record.id)

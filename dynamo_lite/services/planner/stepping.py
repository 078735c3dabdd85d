"""Takes a change that is under way to its end, step by step, also over a planner's death.

A change is a record in etcd; `Operations` and `Switching` say what its steps are.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.protocol.errors import DynamoLiteError, Refused
from dynamo_lite.protocol.planner import OperationRecord, SwitchRecord
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.store import Store
from dynamo_lite.services.planner.authentic import AuthenticRecords

logger = logging.getLogger(__name__)

R = TypeVar("R", OperationRecord, SwitchRecord)

#: How the start of a worker ends without one.
FAILED_STARTS = ("failed", "withdrawn", "refused")

#: How long a change is resumed whose first order may not have been given.
_ORDERED_S = 300.0
_RETRY = Backoff(first_s=1.0, factor=2.0, longest_s=60.0)


@dataclass(kw_only=True)
class Stepped(Generic[R]):
    """A change under way."""

    record: R = field(kw_only=False)
    #: Whether etcd has this record for sure.
    stored: bool = False
    #: Whether etcd has had any record of it for sure.
    known: bool = False
    #: Failed steps in a row, and when the next one may be tried, monotonic.
    failures: int = 0
    retry_at: float = 0.0


async def enter(
    one: Stepped[R], phase: str, key: str, store: Store, records: AuthenticRecords
) -> None:
    """Stores its record with this phase. After StoreUnavailable etcd may have it or not."""
    one.record = msgspec.structs.replace(one.record, phase=phase)
    one.stored = False
    await store.put(key, records.encoded(key, one.record))
    one.stored = one.known = True
    one.failures = 0


def needs_new_id(one: Stepped[R]) -> bool:
    """Whether the first put of its record has failed. Target records that were stored meanwhile
    are newer than its id, so other planners would take its record for a replay."""
    return one.failures > 0 and not one.known


async def step(
    one: Stepped[R],
    work: Callable[[], Awaitable[None]],
    refused: Callable[[Refused], Awaitable[None]],
    *,
    within_s: float,
    clock: Clock,
    what: str,
) -> None:
    """Tries `work`, which a failure of its connector or of etcd puts off.

    refused: called when an order is not possible. what: the change, for the log.
    """
    try:
        async with asyncio.timeout(within_s):
            await work()
    except Refused as exc:
        await refused(exc)
    except (DynamoLiteError, TimeoutError) as exc:
        restart = _RETRY.after_exit(one.failures, 0.0)
        one.failures = restart.failures
        one.retry_at = clock.monotonic() + restart.delay_s
        logger.warning("%s is tried again in %g s: %s", what, restart.delay_s, exc)


async def resumable(
    store: Store, key: str, value: bytes, kind: type[R], clock: Clock, records: AuthenticRecords
) -> R | None:
    """The change that another planner has left at `key`. None: its record is not authentic or
    invalid, or so old that it is deleted. Raises StoreUnavailable."""
    record = records.decoded(key, value, kind)
    if record is None:
        return None
    if record.phase == "ordered" and clock.wall() - record.at > _ORDERED_S:
        # The load was another one then, and the planner does not wait for it.
        logger.warning("%s is dropped: it is too old", record)
        await store.delete(key)
        return None
    return record

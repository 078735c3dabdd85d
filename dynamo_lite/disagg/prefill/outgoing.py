"""The state of an attempt in the prefill rank that writes it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_lite.disagg.messages import BlockWrite
from dynamo_lite.disagg.prefill.staging import Slot
from dynamo_lite.transfer.base import Transfer

#: Returns whether the step that fills the blocks has ended (work on a GPU is queued).
Ready = Callable[[], bool]


@dataclass
class InFlightWrite:
    """A write in flight."""

    write: Transfer
    #: Monotonic time of the start.
    started: float
    #: Whether it is the last write of the attempt.
    last: bool
    #: The staging slot that it reads from; None if it reads blocks.
    slot: Slot | None
    #: None for a write of a single layer.
    of: BlockWrite | None = None


@dataclass
class OutgoingAttempt:
    """Filled by `PrefillRank` where nothing else is said."""

    #: Engine id of the decode engine.
    target: str
    #: Writes that were not started.
    queue: deque[tuple[BlockWrite, Ready]] = field(default_factory=deque)
    in_flight: list[InFlightWrite] = field(default_factory=list)
    #: Local block by position in the attempt; if blocks of both engines have the same size.
    local_ids: dict[int, int] = field(default_factory=dict)
    #: The staging slot of the first write in `queue`, if it has one.
    slot: Slot | None = None
    #: Running checksum by peer; written by `WriteNotifications`.
    checksums: dict[str, int] = field(default_factory=dict)
    #: The next write repeats blocks of earlier writes, and must start after they have ended.
    again: bool = False
    #: Monotonic time when a write was last seen to have ended; written by `WriteTimes`.
    written: float | None = None
    #: `BlockWrite.began` of the last step that has a span; written by `WriteTimes`.
    began: float = -1.0
    #: Why nothing more of the attempt is written.
    failure: str | None = None

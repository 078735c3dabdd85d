"""An attempt as the rank that writes it holds it: what waits, and what is under way."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_lite.disagg.messages import BlockWrite
from dynamo_lite.disagg.prefill.staging import Slot
from dynamo_lite.transfer.base import Transfer

#: Says whether the step that filled the blocks has really ended (GPU work is queued).
Ready = Callable[[], bool]


@dataclass
class InFlightWrite:
    """A write under way. last: no write of the attempt was started after it. slot: that
    it reads from; None where it reads blocks. of: None for one layer of a step."""

    write: Transfer
    started: float
    last: bool
    slot: Slot | None
    of: BlockWrite | None = None


@dataclass
class OutgoingAttempt:
    """target: the engine. local_ids: by position in the attempt, where blocks are equal.

    slot: of the first write in the queue. vouched: see `WriteNotifications`. again: the
    next write brings blocks of earlier ones anew, and must follow them. written: when
    one was last seen to have ended. began: of the step that was noted last.
    """

    target: str
    queue: deque[tuple[BlockWrite, Ready]] = field(default_factory=deque)
    flying: list[InFlightWrite] = field(default_factory=list)
    local_ids: dict[int, int] = field(default_factory=dict)
    slot: Slot | None = None
    vouched: dict[str, int] = field(default_factory=dict)
    again: bool = False
    written: float | None = None
    began: float = -1.0
    failure: str | None = None

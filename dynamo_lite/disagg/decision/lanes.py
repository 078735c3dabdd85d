"""Which prefill jobs go first: lanes on the queue, and the order in which they are pulled.

Within a lane jobs go in order of arrival. Earlier lanes go first, but a lane that has jobs is
passed over only a few times in a row.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Literal


class Lane(Enum):
    """The sub-queue of a job, in the order of service."""

    URGENT = "urgent"
    SHORT = "short"
    LONG = "long"


#: Jobs of earlier lanes that may be pulled in a row while a later lane has jobs.
PATIENCE = 4
#: Lanes whose jobs do not wait for running long ones: a worker keeps slots for them.
BEFORE_LONG = (Lane.URGENT, Lane.SHORT)

#: Effect of the `priority` of a client's request: none, only behind others, or also before them.
ClientPriority = Literal["ignore", "lower-only", "any"]


#: Clients may write any number; one on the wire has 64 bits.
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def granted_priority(asked: int, rule: ClientPriority) -> int:
    """The priority of a client's request. Smaller values go first; 0 is usual."""
    match rule:
        case "ignore":
            return 0
        case "lower-only":
            return min(max(0, asked), _MOST)
        case "any":
            return min(max(_LEAST, asked), _MOST)


def lane_of(tokens: int, priority: int, short_length: int) -> Lane:
    """The lane of a job with `tokens` tokens to compute.

    priority: as in vLLM, smaller values go first; 0 is usual.
    """
    if priority < 0:
        return Lane.URGENT
    return Lane.SHORT if priority == 0 and tokens <= short_length else Lane.LONG


class LaneTurns:
    """The order of lanes for one puller, from what it has pulled."""

    def __init__(self) -> None:
        self._passed = dict.fromkeys(Lane, 0)

    def order(self, lanes: Sequence[Lane]) -> list[Lane]:
        """These lanes in the order in which the puller tries them."""
        waited = [lane for lane in lanes if self._passed[lane] >= PATIENCE]
        waited.sort(key=lambda lane: -self._passed[lane])
        return waited + [lane for lane in Lane if lane in lanes and lane not in waited]

    def took(self, lane: Lane, order: Sequence[Lane]) -> None:
        """A job of `lane` was pulled: it was the first lane in `order` that had any."""
        passed = False
        for other in order:
            self._passed[other] = self._passed[other] + 1 if passed else 0
            passed = passed or other is lane

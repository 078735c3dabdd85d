"""Which prefill jobs go before which: lanes on the queue, and whose turn it is.

Within a lane jobs go in the order of their arrival. Earlier lanes go first, but no lane
is passed over more than a few times in a row while it has jobs.
"""

from collections.abc import Sequence
from typing import Literal

from dynamo_lite.protocol.backlog import Lane

#: So many jobs of earlier lanes may be taken in a row while a lane has some.
PATIENCE = 4
#: Whose jobs do not wait for long ones that are under way: a worker keeps slots for them.
BEFORE_LONG = (Lane.URGENT, Lane.SHORT)

#: What the `priority` of a client's request may do: nothing, only put it behind others, or
#: also before them.
ClientPriority = Literal["ignore", "lower-only", "any"]


def granted_priority(asked: int, rule: ClientPriority) -> int:
    """The priority of a client's request. Smaller ones go first; 0 is usual."""
    match rule:
        case "ignore":
            return 0
        case "lower-only":
            return max(0, asked)
        case "any":
            return asked


def lane_of(tokens: int, priority: int, short_length: int) -> Lane:
    """Where a job of so many tokens to compute waits.

    priority: as vLLM has it, smaller ones first; 0 is usual.
    """
    if priority < 0:
        return Lane.URGENT
    return Lane.SHORT if priority == 0 and tokens <= short_length else Lane.LONG


class LaneTurns:
    """One puller's memory of what it has taken."""

    def __init__(self) -> None:
        self._passed = dict.fromkeys(Lane, 0)

    def order(self, lanes: Sequence[Lane]) -> list[Lane]:
        """These lanes in the order in which they are asked for a job."""
        waited = [lane for lane in lanes if self._passed[lane] >= PATIENCE]
        waited.sort(key=lambda lane: -self._passed[lane])
        return waited + [lane for lane in Lane if lane in lanes and lane not in waited]

    def took(self, lane: Lane, order: Sequence[Lane]) -> None:
        """A job of this lane, which was the first one in this order that had any."""
        passed = False
        for other in order:
            self._passed[other] = self._passed[other] + 1 if passed else 0
            passed = passed or other is lane

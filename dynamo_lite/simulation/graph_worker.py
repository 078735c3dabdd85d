"""A worker of a simulated graph, as its supervisor keeps it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    # It imports the parts that may replace the switches of workers.
    from dynamo_lite.simulation.supervisor import Slot


class Worker:
    """A worker that the supervisor keeps running. began: when it was started for the first time."""

    def __init__(self, component: str, slot: "Slot", lease_of: Callable[[str], int], began: float):
        self.component, self.slot, self._lease_of = component, slot, lease_of
        self.began = began
        self.retired = False
        self.ended = False
        #: Its lease when it was retired, or told to leave.
        self.last_lease = 0

    @property
    def lease_id(self) -> int:
        return self._lease_of(self.slot.name)

    @property
    def phase(self) -> Literal["starting", "ready", "draining", "ended"]:
        if self.ended:
            return "ended"
        if self.retired:
            return "draining"
        return "ready" if self.slot.was_ready else "starting"

"""Switches of workers to another role by the simulated supervisor, as `serve/switches.py`."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.planner import SwitchState
from dynamo_lite.simulation.graph_worker import Worker

#: How many switches are remembered.
_REMEMBERED = 8


@dataclass(kw_only=True)
class SimSwitch:
    """One switch. Times are virtual; None: not yet."""

    worker: Worker
    #: Of the worker, when the switch was ordered.
    lease_id: int
    to: str
    began: float
    drained: float | None = None
    #: None: not started yet, or it never will be.
    successor: Worker | None = None
    cancelled: bool = False

    @property
    def settled(self) -> bool:
        """The successor was ready, or never will be."""
        if self.successor is None:
            return self.drained is not None
        return self.successor.ended or self.successor.slot.was_ready

    def state(self, now: float) -> SwitchState:
        drained = now if self.drained is None else self.drained
        slot = None if self.successor is None else self.successor.slot
        ready = None if slot is None else slot.ready_at
        if ready is not None:
            phase = "done"
        elif self.settled:
            phase = "ended"
        else:
            phase = "draining" if self.drained is None else "starting"
        return SwitchState(
            component=self.worker.component,
            lease_id=self.lease_id,
            to=self.to,
            phase=phase,
            successor="" if slot is None else slot.name,
            drain_s=drained - self.began,
            start_s=(now if ready is None else ready) - drained,
            failures=0 if slot is None or phase == "done" else slot.restarts,
        )


class SimSwitches:
    """Bookkeeping; one switch at a time. now: seconds of virtual time."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._last: deque[SimSwitch] = deque(maxlen=_REMEMBERED)

    def __iter__(self) -> Iterator[SimSwitch]:
        return iter(self._last)

    def states(self) -> list[SwitchState]:
        now = self._now()
        return [switch.state(now) for switch in self._last]

    def begun(self, component: str, lease_id: int, to: str) -> bool:
        """Whether this switch was begun already."""
        wanted = component, lease_id, to
        return any((one.worker.component, one.lease_id, one.to) == wanted for one in self._last)

    def begin(self, worker: Worker, to: str) -> None:
        """Raises Refused."""
        if any(not switch.settled for switch in self._last):
            raise Refused("a switch is under way", elsewhere=False)
        if to == worker.component:
            raise Refused(f"{to}: it has this role already", elsewhere=False)
        if worker.phase != "ready":
            raise Refused(f"{worker.slot.name}: it leaves already", elsewhere=False)
        self._last.append(
            SimSwitch(worker=worker, lease_id=worker.lease_id, to=to, began=self._now())
        )

    def ended(self, worker: Worker) -> SimSwitch | None:
        """The worker has ended. Returns the switch whose successor is to be started now."""
        for switch in self._last:
            if switch.worker is worker:
                switch.drained = self._now()
                return None if switch.cancelled else switch
        return None

    def cancel(self, component: str, lease_id: int) -> SimSwitch | None:
        """The successor of this worker is not started, or ends, unless it was ready. Returns
        None if there is no such switch."""
        for switch in self._last:
            if (switch.to, switch.lease_id) == (component, lease_id) and not switch.settled:
                switch.cancelled = True
                return switch
        return None

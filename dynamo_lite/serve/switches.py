"""Workers that change their role: one drains, and one of another component gets its devices.

The devices belong to the switch from its order until the successor has them, so no other process
can take them. Both processes never run at the same time. There is one switch at a time.
"""

import time
from collections import deque
from dataclasses import dataclass

from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.planner import SwitchState
from dynamo_lite.serve.fleet import Fleet
from dynamo_lite.serve.instance_supervisor import InstanceSupervisor
from dynamo_lite.serve.progress import Progress

#: How many switches are remembered, for clients that ask how a switch has ended.
_REMEMBERED = 8


@dataclass(kw_only=True)
class RoleSwitch:
    """One switch. Times are monotonic; None: not yet."""

    worker: InstanceSupervisor
    lease_id: int
    successor: InstanceSupervisor
    began: float
    drained: float | None = None
    settled: float | None = None
    cancelled: bool = False

    @property
    def to(self) -> str:
        return self.successor.launch.service

    def state(self, now: float) -> SwitchState:
        drained = now if self.drained is None else self.drained
        settled = now if self.settled is None else self.settled
        if self.successor.ready.is_set():
            phase = "done"
        elif self.settled is not None:
            phase = "ended"
        else:
            phase = "draining" if self.drained is None else "starting"
        return SwitchState(
            component=self.worker.launch.service,
            lease_id=self.lease_id,
            to=self.to,
            phase=phase,
            successor=self.successor.launch.name,
            drain_s=drained - self.began,
            start_s=settled - drained,
            failures=0 if phase == "done" else self.successor.state.restarts,
            error=self.successor.state.error[:1024],
        )


class Switches:
    """Bookkeeping; `Supervisor` runs the processes."""

    def __init__(self, fleet: Fleet, progress: Progress):
        self._fleet, self._progress = fleet, progress
        self._last: deque[RoleSwitch] = deque(maxlen=_REMEMBERED)

    def states(self) -> list[SwitchState]:
        now = time.monotonic()
        return [switch.state(now) for switch in self._last]

    def begun(self, component: str, lease_id: int, to: str) -> RoleSwitch | None:
        """Returns this switch if it was begun already, else None."""
        for switch in self._last:
            if (switch.worker.launch.service, switch.lease_id, switch.to) == (
                component,
                lease_id,
                to,
            ):
                return switch
        return None

    def begin(self, component: str, lease_id: int, to: str) -> RoleSwitch:
        """Raises Refused."""
        for switch in self._last:
            if switch.settled is None:
                names = f"{switch.worker.launch.name} to {switch.successor.launch.name}"
                raise Refused(f"a switch is under way: {names}", elsewhere=False)
        worker, successor = self._fleet.promise(component, lease_id, to)
        switch = RoleSwitch(
            worker=worker, lease_id=lease_id, successor=successor, began=time.monotonic()
        )
        self._last.append(switch)
        name = successor.launch.name
        self._progress.line(worker.launch.name, f"drains; {name} gets its place")
        return switch

    def hand_over(self, switch: RoleSwitch, *, starts: bool) -> bool:
        """The worker has ended. Returns whether its successor may be started.

        starts: whether the graph still starts processes.
        """
        switch.drained = time.monotonic()
        if not starts or switch.cancelled:
            self._fleet.break_promise(switch.worker)
            return False
        self._fleet.hand_over(switch.worker)
        self._progress.line(
            switch.successor.launch.name, f"starts in the place of {switch.worker.launch.name}"
        )
        return True

    def settle(self, switch: RoleSwitch) -> None:
        """The successor is ready or will never be."""
        switch.settled = time.monotonic()

    def cancel(self, component: str, lease_id: int) -> RoleSwitch | None:
        """Stops the successor of this worker, unless it was ready. Returns None if there is no
        such switch."""
        for switch in self._last:
            if (switch.to, switch.lease_id) != (component, lease_id):
                continue
            if switch.settled is None and not switch.successor.ready.is_set():
                switch.cancelled = True
                switch.successor.stop()
                return switch
        return None

"""Workers that change their role: one drains, and one of another component gets its devices.

At level 2 the process of the one goes on as that of the other, with its engine; at level 1, and
whenever level 2 fails, a new process is started.

The devices belong to the switch from its order until the successor has them, so no other process
can take them. Two processes never run at the same time. There is one switch at a time.
"""

import time
from dataclasses import dataclass, field

from dynamo_lite.policy.scaling.switch_book import BookedSwitch, SwitchBook
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.planner import SwitchState
from dynamo_lite.serve.fleet import Fleet
from dynamo_lite.serve.instance_supervisor import InstanceSupervisor
from dynamo_lite.serve.progress import Progress


@dataclass(kw_only=True)
class RoleSwitch(BookedSwitch):
    """One switch. Times are monotonic."""

    worker: InstanceSupervisor
    successor: InstanceSupervisor
    settled_at: float | None = None
    #: Why its engine was not kept, once it has settled.
    _told: str = field(default="", init=False)

    @property
    def keeps(self) -> bool:
        """Whether the worker's process is to go on as the successor."""
        return self.worker.launch.switchable and self.successor.launch.switchable

    @property
    def settled(self) -> bool:
        return self.settled_at is not None or self.successor.ready.is_set()

    @property
    def _kept(self) -> bool:
        """What becomes of the successor later is no part of the switch."""
        ready = self.successor.ready.is_set()
        return self.successor.began_kept if ready else self.successor.took_over

    @property
    def _not_kept(self) -> str:
        if self.settled_at is not None:
            return self._told
        if self._kept or not self.keeps:
            return ""
        return self.worker.not_kept or self.successor.not_kept

    def settle(self, now: float) -> None:
        """The successor is ready or will never be. Either worker may be switched again."""
        self.settled_at, self._told = now, self._not_kept

    def state(self, now: float) -> SwitchState:
        return self.state_with(
            now,
            successor=self.successor.launch.name,
            ready=self.successor.ready.is_set(),
            started=self.settled_at,
            failures=self.successor.state.restarts,
            error=self.successor.state.error,
            level=2 if self._kept else 1,
            not_kept=self._not_kept,
            change_s=self.successor.change_s,
        )


class Switches:
    """Bookkeeping; `Supervisor` runs the processes."""

    def __init__(self, fleet: Fleet, progress: Progress):
        self._fleet, self._progress = fleet, progress
        self._book: SwitchBook[RoleSwitch] = SwitchBook()

    def states(self) -> list[SwitchState]:
        return self._book.states(time.monotonic())

    def begun(self, component: str, lease_id: int, to: str) -> RoleSwitch | None:
        """This switch, if it was begun already."""
        return self._book.begun(component, lease_id, to)

    def begin(self, component: str, lease_id: int, to: str) -> RoleSwitch:
        """Raises Refused."""
        if (other := self._book.under_way) is not None:
            names = f"{other.worker.launch.name} to {other.successor.launch.name}"
            raise Refused(f"a switch is under way: {names}", elsewhere=False)
        worker, successor = self._fleet.promise(component, lease_id, to)
        switch = RoleSwitch(
            component=component,
            lease_id=lease_id,
            to=to,
            began=time.monotonic(),
            worker=worker,
            successor=successor,
        )
        self._book.add(switch)
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
        switch.settle(time.monotonic())

    def cancel(self, component: str, lease_id: int) -> RoleSwitch | None:
        """Stops the successor of this worker, unless it was ready. None: there is none."""
        switch = self._book.cancel(component, lease_id)
        if switch is not None:
            switch.successor.stop()
        return switch

"""Switches of workers to another role by the simulated supervisor, as `serve/switches.py`."""

from collections.abc import Callable
from dataclasses import dataclass

from dynamo_lite.policy.scaling.switch_book import BookedSwitch, SwitchBook
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.planner import SwitchState
from dynamo_lite.simulation.graph_worker import Worker


@dataclass(kw_only=True)
class SimSwitch(BookedSwitch):
    """One switch. Times are virtual."""

    worker: Worker
    #: None: not started yet, or it never will be.
    successor: Worker | None = None

    @property
    def settled(self) -> bool:
        if self.successor is None:
            return self.drained is not None
        return self.successor.ended or self.successor.slot.was_ready

    def state(self, now: float) -> SwitchState:
        slot = None if self.successor is None else self.successor.slot
        ready_at = None if slot is None else slot.ready_at
        return self.state_with(
            now,
            successor="" if slot is None else slot.name,
            ready=ready_at is not None,
            started=ready_at,
            failures=0 if slot is None else slot.restarts,
        )


class SimSwitches(SwitchBook[SimSwitch]):
    """now: seconds of virtual time."""

    def __init__(self, now: Callable[[], float]):
        super().__init__()
        self._now = now

    def begin(self, worker: Worker, to: str) -> None:
        """Raises Refused."""
        if self.under_way is not None:
            raise Refused("a switch is under way", elsewhere=False)
        if to == worker.component:
            raise Refused(f"{to}: it has this role already", elsewhere=False)
        if worker.phase != "ready":
            raise Refused(f"{worker.slot.name}: it leaves already", elsewhere=False)
        self.make(worker, to)

    def make(self, worker: Worker, to: str) -> None:
        """Adds the switch, whatever else is under way."""
        self.add(
            SimSwitch(
                component=worker.component,
                lease_id=worker.lease_id,
                to=to,
                began=self._now(),
                worker=worker,
            )
        )

    def ended(self, worker: Worker) -> SimSwitch | None:
        """The worker has ended. Returns the switch whose successor is to be started now."""
        switch = self.under_way
        if switch is None or switch.worker is not worker:
            return None
        switch.drained = self._now()
        return None if switch.cancelled else switch

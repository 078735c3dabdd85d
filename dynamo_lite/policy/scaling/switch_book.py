"""The last switches of workers to another role, as a supervisor keeps them. Pure."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from dynamo_lite.protocol.planner import SwitchState

#: Number of ended switches that are remembered, for clients that ask how one has ended.
_REMEMBERED = 8


@dataclass(kw_only=True)
class BookedSwitch(ABC):
    """One switch. Times are seconds of one clock; None: not yet."""

    component: str
    #: Of the worker that drains, when the switch was ordered.
    lease_id: int
    to: str
    began: float
    drained: float | None = None
    cancelled: bool = False

    @property
    @abstractmethod
    def settled(self) -> bool:
        """The successor was ready, or never will be."""

    @abstractmethod
    def state(self, now: float) -> SwitchState: ...

    def state_with(
        self,
        now: float,
        *,
        successor: str,
        ready: bool,
        started: float | None,
        failures: int,
        error: str = "",
        level: Literal[1, 2] = 1,
        not_kept: str = "",
        change_s: float = 0.0,
    ) -> SwitchState:
        """successor: its name; empty without one. ready: whether it was. started: when its start
        was over. failures, error: of its starts. The others: as in `SwitchState`."""
        drained = now if self.drained is None else self.drained
        if ready:
            phase = "done"
        elif self.settled:
            phase = "ended"
        else:
            phase = "draining" if self.drained is None else "starting"
        return SwitchState(
            component=self.component,
            lease_id=self.lease_id,
            to=self.to,
            phase=phase,
            successor=successor,
            drain_s=drained - self.began,
            start_s=(now if started is None else started) - drained,
            failures=0 if ready else failures,
            error=error[:1024],
            level=level,
            not_kept=not_kept[:1024],
            change_s=change_s if level == 2 else 0.0,
        )


def times_text(state: SwitchState) -> str:
    """At which level a switch that has succeeded was made, and how long each phase took."""
    if state.level == 2:
        registered_s = max(state.start_s - state.change_s, 0.0)
        return (
            f"level 2: drained in {state.drain_s:.1f} s, engine changed in {state.change_s:.2f} s,"
            f" registered in {registered_s:.1f} s"
        )
    times = f"level 1: drained in {state.drain_s:.1f} s, started in {state.start_s:.1f} s"
    return times + (f"; the engine was not kept: {state.not_kept}" if state.not_kept else "")


S = TypeVar("S", bound=BookedSwitch)


class SwitchBook(Generic[S]):
    """One switch at a time: the next one may be added when `under_way` is None."""

    def __init__(self) -> None:
        self._last: deque[S] = deque(maxlen=_REMEMBERED)

    def states(self, now: float) -> list[SwitchState]:
        """Oldest first."""
        return [switch.state(now) for switch in self._last]

    @property
    def under_way(self) -> S | None:
        return next((switch for switch in self._last if not switch.settled), None)

    def begun(self, component: str, lease_id: int, to: str) -> S | None:
        """This switch, if it was begun already."""
        wanted = component, lease_id, to
        for switch in self._last:
            if (switch.component, switch.lease_id, switch.to) == wanted:
                return switch
        return None

    def add(self, switch: S) -> None:
        self._last.append(switch)

    def cancel(self, to: str, lease_id: int) -> S | None:
        """Cancels the switch of this worker to the component `to`, unless its successor was ready.
        None: there is none under way."""
        switch = self.under_way
        if switch is None or (switch.to, switch.lease_id) != (to, lease_id):
            return None
        switch.cancelled = True
        return switch

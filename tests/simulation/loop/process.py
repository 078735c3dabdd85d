"""A simulated process: which handles of the loop are its own, and whether they may run.

A process is a value of a context variable. Every handle carries the context in which it was
made, so everything that a process's code starts belongs to that process.
"""

import contextvars
import enum
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_lite.runtime.clock import Clock

if TYPE_CHECKING:
    from tests.simulation.loop.handles import SimHandle, SimTask
    from tests.simulation.loop.loop import VirtualLoop

T = TypeVar("T")


class SimState(enum.Enum):
    """The state of a simulated process."""

    RUNNING = "running"
    PAUSED = "paused"  # as by SIGSTOP: nothing of it runs, everything is kept
    DEAD = "dead"  # as by SIGKILL, or ended: nothing of it runs ever again


class SimProcess:
    """One incarnation of a named process. States: running <-> paused, both -> dead.

    A paused process's handles wait in their order, also those of timers that come
    due: they run when it goes on, as those of a process that was stopped do. A dead
    process's handles are dropped: no `finally` and no `except` of it runs.

    host: processes of one host share its wall clock, and reach each other always.
    """

    def __init__(self, loop: "VirtualLoop", name: str, incarnation: int, host: str):
        self.loop = loop
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.state = SimState.RUNNING
        #: Handles that may run now, oldest first; written by the loop.
        self.ready: deque[SimHandle] = deque()
        #: Whether it is running and nothing is ready; written by the loop.
        self.idle = True
        self.clock = Clock(monotonic=loop.time, wall=self.wall, boottime=loop.time)
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        #: Called as (process, new state), in order of registration, by `pause`, `resume`,
        #: `kill` and `exit`; outside of every process.
        self.watchers: list[Callable[[SimProcess, SimState], None]] = []

    def __repr__(self) -> str:
        return f"SimProcess({self}, {self.state.value})"

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"

    @property
    def running(self) -> bool:
        return self.state is SimState.RUNNING

    @property
    def dead(self) -> bool:
        return self.state is SimState.DEAD

    def wall(self) -> float:
        """Seconds since the epoch, as the clock of its host shows them."""
        return self.loop.wall(self.host)

    def spawn(self, coro: Coroutine[Any, Any, T], name: str | None = None) -> "SimTask[T]":
        """A task of this process."""
        return self.loop.create_task(coro, name=name, context=self.context.copy())

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Calls `function` now, as this process: what it starts is the process's."""
        return self.context.copy().run(function, *args)

    def pause(self) -> None:
        if self.state is SimState.RUNNING:
            self._become(SimState.PAUSED)

    def resume(self) -> None:
        if self.state is SimState.PAUSED:
            self._become(SimState.RUNNING)

    def kill(self) -> None:
        """Ends it as SIGKILL does. A handle of it that is running gets to its end."""
        if self.state is not SimState.DEAD:
            self._become(SimState.DEAD)

    def exit(self) -> list[str]:
        """Ends it after its main task has returned. Returns the names of tasks it left behind."""
        left = [task.get_name() for task in self.tasks()]
        self.kill()
        return left

    def tasks(self) -> list["SimTask[Any]"]:
        """Its tasks that are not done, oldest first; of a dead process those that it left."""
        return self.loop.tasks_of(self)

    def _become(self, state: SimState) -> None:
        self.state = state
        self.loop.process_changed(self)
        for watcher in list(self.watchers):
            watcher(self, state)


#: The process whose code is running. Unset in the code that drives the simulation.
PROCESS: contextvars.ContextVar[SimProcess] = contextvars.ContextVar("dynamo_lite_sim_process")

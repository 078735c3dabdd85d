"""Simulated processes, and which of them runs next, at what time.

A process is a value of a context variable. Every handle carries the context in which it was
made, so everything that a process's code starts belongs to that process.

Nothing waits in real time: when no handle is ready the clock jumps to the next timer. Handles of
one process run in the order in which they became ready, as asyncio code expects;
between processes that are ready at the same time a seeded choice decides.
"""

import asyncio
import contextvars
import enum
import random
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_lite.runtime.clock import Clock

if TYPE_CHECKING:
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
        self._pauses = 0
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
        self._pauses += 1
        if self.state is SimState.RUNNING:
            self._become(SimState.PAUSED)

    def resume(self) -> None:
        """Ends a `pause`. If there were several, it runs after the last one."""
        self._pauses -= 1
        if self.state is SimState.PAUSED and not self._pauses:
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


class SimHandle(asyncio.Handle):
    """As asyncio's, without debug mode."""

    __slots__ = ("process", "when_s")

    #: The process whose code it runs.
    process: "SimProcess"
    #: Loop time at which a timer is due.
    when_s: float

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        process: "SimProcess",
    ):
        self._callback: Any = callback
        self._args: Any = args
        self._context = context
        self._cancelled = False
        self.process = process

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            # The loop calls it without a look at `_cancelled`.
            self._callback = _nothing
            self._args = ()

    def when(self) -> float:
        """Loop time of a timer."""
        return self.when_s


def _nothing() -> None:
    return


class SimTask(asyncio.Task[T]):
    """A task of a simulated process. Its place in a set is the same in every run."""

    __slots__ = ("number", "process")

    #: Counts the loop's tasks from 1; also the hash.
    number: int
    process: "SimProcess"

    def __hash__(self) -> int:
        # First called by asyncio's own registry of tasks while the task is constructed.
        try:
            return self.number
        except AttributeError:
            loop: VirtualLoop = self.get_loop()  # pyright: ignore[reportAssignmentType]
            loop.tasks_made += 1
            self.number = loop.tasks_made
            return self.number


#: More handles than this at one instant of virtual time are an endless loop.
_MAX_HANDLES_PER_INSTANT = 500_000
#: Virtual monotonic time starts here, not at 0: code may mistake 0 for "never".
START_S = 1000.0


class SimulationStuck(RuntimeError):
    """No timer and no ready handle is left, or virtual time does not advance."""


class Scheduler(asyncio.BaseEventLoop):
    """The part of the loop that runs handles."""

    #: The process of handles that belong to no other.
    world: SimProcess
    #: Set by asyncio's `stop`.
    _stopping: bool

    def __init__(self, rng: random.Random):
        super().__init__()
        self.set_debug(False)
        self.rng = rng
        #: Handles run so far; cancelled ones count.
        self.handles_run = 0
        self._now = START_S
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._timer_number = 0
        #: `handles_run` may not exceed it before time advances.
        self._most_handles = _MAX_HANDLES_PER_INSTANT
        #: Running processes with ready handles, without `_taken`.
        self._active: list[SimProcess] = []
        #: The process whose handles run now.
        self._taken: SimProcess | None = None

    #: Called for every future and every task. It is always False; `bool` needs no Python frame.
    get_debug = staticmethod(bool)  # pyright: ignore[reportAssignmentType]

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> SimHandle:
        if context is None:
            context = contextvars.copy_context()
        process: SimProcess = context.get(PROCESS, self.world)
        handle = SimHandle(callback, args, context, process)
        process.ready.append(handle)
        if process.idle:
            process.idle = False
            self._active.append(process)
        return handle

    call_soon_threadsafe = call_soon  # pyright: ignore[reportAssignmentType]

    def call_later(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        if context is None:
            context = contextvars.copy_context()
        handle = SimHandle(callback, args, context, context.get(PROCESS, self.world))
        handle.when_s = when
        self._timer_number += 1
        heappush(self._timers, (when, self._timer_number, handle))
        return handle

    def process_changed(self, process: SimProcess) -> None:
        """To be called when a process was paused, resumed or killed."""
        if process in self._active:
            self._active.remove(process)
        process.idle = False
        if process.state is SimState.RUNNING and process is not self._taken:
            if process.ready:
                self._active.append(process)
            else:
                process.idle = True

    def _run_once(self) -> None:
        """Turns of processes and jumps of the clock until the loop is stopped.

        asyncio calls this again and again. One call for all turns is cheaper, and so is one
        function for all of a turn.
        """
        active, random, running = self._active, self.rng.random, SimState.RUNNING
        while True:
            while not active:
                self._advance()
            place = int(random() * len(active)) if len(active) > 1 else 0
            active[place], active[-1] = active[-1], active[place]
            self._taken = process = active.pop()
            # Its turn: the handles that are ready now.
            ready = process.ready
            turn = len(ready)
            for _ in range(turn):
                handle = ready.popleft()
                try:
                    handle._context.run(handle._callback, *handle._args)
                except BaseException as exc:
                    self._raised(process, exc)
                if process.state is not running:
                    break
            self._taken = None
            if process.state is running:
                if ready:
                    active.append(process)
                else:
                    process.idle = True
            self.handles_run += turn
            if self.handles_run > self._most_handles:
                raise SimulationStuck(f"time does not advance; {process} is busy")
            if self._stopping:
                return

    def _raised(self, process: SimProcess, exc: BaseException) -> None:
        if isinstance(exc, SystemExit | KeyboardInterrupt):
            raise exc
        what = f"a callback of {process} raised"
        self.call_exception_handler({"message": what, "exception": exc})

    def _advance(self) -> None:
        timers = self._timers
        while True:
            if not timers:
                raise SimulationStuck(f"no timer and no ready handle; waiting: {self._waiting()}")
            now, _, handle = heappop(timers)
            if not handle._cancelled:
                break
        if now > self._now:
            self._now = now
            self._most_handles = self.handles_run + _MAX_HANDLES_PER_INSTANT
        # This timer, and all others that are due now.
        while True:
            if not handle._cancelled:
                process = handle.process
                process.ready.append(handle)
                if process.idle:
                    process.idle = False
                    self._active.append(process)
            if not timers or timers[0][0] > now:
                return
            handle = heappop(timers)[2]

    def _waiting(self) -> str:
        tasks = sorted((t for t in asyncio.all_tasks(self) if isinstance(t, SimTask)), key=hash)
        return ", ".join(f"{task.process}: {task.get_name()}" for task in tasks) or "no task"

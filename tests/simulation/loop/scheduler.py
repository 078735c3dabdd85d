"""Time and order in a simulation: which process runs next, and at what time.

Nothing waits in real time: when no handle is ready the clock jumps to the next timer. Handles of
one process run in the order in which they became ready, as asyncio code expects;
between processes that are ready at the same time a seeded choice decides.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from tests.simulation.loop.handles import SimHandle, SimTask
from tests.simulation.loop.process import PROCESS, SimProcess, SimState

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
        #: Cancelled timers that are still in `_timers`; incremented by their handles.
        self.cancelled_timers = 0
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
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
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
        handle.timed = True
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
        if self.cancelled_timers > 100 and self.cancelled_timers * 2 > len(timers):
            self._timers = timers = [timer for timer in timers if not timer[2]._cancelled]
            heapify(timers)
            self.cancelled_timers = 0
        while True:
            if not timers:
                raise SimulationStuck(f"no timer and no ready handle; waiting: {self._waiting()}")
            now, _, handle = heappop(timers)
            if not handle._cancelled:
                break
            self.cancelled_timers -= 1
        if now > self._now:
            self._now = now
            self._most_handles = self.handles_run + _MAX_HANDLES_PER_INSTANT
        # This timer, and all others that are due now.
        while True:
            handle.timed = False
            if handle._cancelled:
                self.cancelled_timers -= 1
            else:
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

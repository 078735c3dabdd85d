"""An event loop in virtual time for many simulated processes.

Nothing waits: when no handle is ready the clock jumps to the next timer. Handles of
one process run in the order in which they became ready, as asyncio code expects;
between processes that are ready at the same time a seeded choice decides.
"""

import asyncio
import contextvars
import gc
import heapq
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_lite.sim.process import PROCESS, SimProcess, State
from dynamo_lite.sim.trace import Trace

if TYPE_CHECKING:
    from dynamo_lite.sim.network import Network
    from dynamo_lite.sim.stream import StreamServer, StreamTransport

T = TypeVar("T")

#: So many handles without time going on are a loop that never ends.
_MAX_HANDLES_PER_INSTANT = 500_000
#: Virtual monotonic time starts here: code that mistakes 0 for "never" shall show.
START_S = 1000.0
#: Wall time at START_S, the same in every run.
EPOCH_S = 1_800_000_000.0


class SimulationStuck(RuntimeError):
    """Nothing will ever happen again, or time does not go on."""


class SimHandle(asyncio.Handle):
    """As asyncio's, without debug mode; `process` is whose it is, `timed` whether it
    waits for its time."""

    __slots__ = ("process", "timed", "when_s")

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        process: SimProcess,
    ):
        self._callback: Any = callback
        self._args: Any = args
        self._context = context
        self._cancelled = False
        self.process = process
        self.timed = False

    def __repr__(self) -> str:
        state = "cancelled" if self._cancelled else getattr(self._callback, "__qualname__", "?")
        return f"<SimHandle {self.process} {state}>"

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = None
            self._args = None
            if self.timed:
                self.process.loop.cancelled_timers += 1

    def when(self) -> float:
        """Loop time of a timer."""
        return self.when_s


class SimTask(asyncio.Task[T]):
    """A task that knows whose it is, and whose place in a set is the same in every run."""

    __slots__ = ("number", "process")

    number: int
    process: SimProcess

    def __hash__(self) -> int:
        # Asked for the first time by asyncio's own registry of tasks, as it is made.
        try:
            return self.number
        except AttributeError:
            loop: VirtualLoop = self.get_loop()  # pyright: ignore[reportAssignmentType]
            loop.tasks_made += 1
            self.number = loop.tasks_made
            return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """Use as a context manager, and run with `run_until_complete`; at most one per thread.

    `close` forgets everything that is left without running any of it to its end.
    While it is open the cyclic garbage collector is off, so that no `finally` of a
    forgotten coroutine runs at a moment that depends on the memory's state.

    failures: what asyncio would have logged: callbacks that raised, tasks whose
    exception nobody took.
    """

    def __init__(self, seed: int = 0, *, trace: Trace | None = None):
        super().__init__()
        self.set_debug(False)
        self.rng = random.Random(seed)
        self.seed = seed
        self.trace = trace or Trace()
        self.trace.loop = self
        self.network: Network | None = None  # set by the one that is made for this loop
        self.failures: list[str] = []
        self.handles_run = 0
        self.tasks_made = 0
        self.cancelled_timers = 0
        self._now = START_S
        self._wall_jumps: dict[str, float] = {}
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._timer_number = 0
        self._processes: dict[str, SimProcess] = {}
        self._dead_tasks: list[SimTask[Any]] = []
        self._dead_handles: list[deque[SimHandle]] = []
        self._handles_at_instant = 0
        self._active: list[SimProcess] = []  # running, and something is ready
        self._world = SimProcess(self, "world", 0, "world")
        self._collecting = gc.isenabled()
        gc.disable()
        gc.freeze()  # so that the collection at the end looks at this run's objects only
        self.set_exception_handler(_note_failure)

    def __enter__(self) -> "VirtualLoop":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_process(self, name: str, *, host: str = "") -> SimProcess:
        """The next incarnation of `name`; the one before must be dead.

        host: where it runs; a host of its own, called as itself, when empty.
        """
        former = self._processes.get(name)
        if former is not None and not former.dead:
            raise ValueError(f"{former} is still there")
        incarnation = former.incarnation + 1 if former else 1
        process = SimProcess(self, name, incarnation, host or name)
        self._processes[name] = process
        return process

    @property
    def processes(self) -> dict[str, SimProcess]:
        """The newest incarnation of each name, dead or not."""
        return self._processes

    def current_process(self) -> SimProcess:
        """Whose code is running; the process "world" outside of all others."""
        return PROCESS.get(self._world)

    def wall(self, host: str) -> float:
        """Seconds since the epoch, as the clock of `host` shows them."""
        return self._now - START_S + EPOCH_S + self._wall_jumps.get(host, 0.0)

    def jump_wall(self, host: str, seconds: float) -> None:
        """Sets the clock of `host` forward, or back; nobody's monotonic time changes."""
        self._wall_jumps[host] = self._wall_jumps.get(host, 0.0) + seconds

    def stream(self, name: str) -> random.Random:
        """A random source of its own, from this loop's seed."""
        return random.Random(f"{self.seed}/{name}")

    def fingerprint(self) -> str:
        """Equal for equal runs: how far they came, and every random choice so far."""
        return f"{self._now!r}/{self.handles_run}/{self.tasks_made}/{self.rng.getrandbits(64):x}"

    # What asyncio asks of a loop

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
        process: SimProcess = context.get(PROCESS, self._world)
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
        handle = SimHandle(callback, args, context, context.get(PROCESS, self._world))
        handle.when_s = when
        handle.timed = True
        self._timer_number += 1
        heapq.heappush(self._timers, (when, self._timer_number, handle))
        return handle

    def create_task(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> SimTask[T]:
        # A default name would count on over all runs of this interpreter.
        name = name or f"task {self.tasks_made + 1}"
        task = SimTask(coro, loop=self, name=name, context=context)
        if context is None:
            process = PROCESS.get(self._world)
        else:
            process = context.get(PROCESS, self._world)
        task.process = process
        process.tasks_made.add(task)
        if process.state is State.DEAD:
            self._hide(task)
        return task

    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """There are no threads: `func` runs in the loop's next turn."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as exc:
                future.set_exception(exc)

        self.call_soon(work)
        return future

    async def create_server(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        **_: Any,
    ) -> "StreamServer":
        return self._network.create_server(protocol_factory, host or "127.0.0.1", port or 0)

    async def create_connection(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        **_: Any,
    ) -> "tuple[StreamTransport, asyncio.BaseProtocol]":
        return await self._network.create_connection(protocol_factory, host or "", port or 0)

    @property
    def _network(self) -> "Network":
        if self.network is None:
            raise OSError("this loop has no network")
        return self.network

    def _run_once(self) -> None:
        """One turn of one process, or a jump of the clock."""
        active = self._active
        if not active:
            self._advance()
            return
        place = int(self.rng.random() * len(active)) if len(active) > 1 else 0
        active[place], active[-1] = active[-1], active[place]
        process = active.pop()
        ready = process.ready
        turn = len(ready)
        for _ in range(turn):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as exc:
                what = f"a callback of {process} raised"
                self.call_exception_handler({"message": what, "exception": exc})
            if process.state is not State.RUNNING:
                break
        self.handles_run += turn
        self._handles_at_instant += turn
        if self._handles_at_instant > _MAX_HANDLES_PER_INSTANT:
            raise SimulationStuck(f"time does not go on; {process} is busy")
        if process.state is State.RUNNING and not process.idle:
            # Nobody else lists it while it is taken off and not idle.
            if ready:
                active.append(process)
            else:
                process.idle = True

    def _advance(self) -> None:
        timers = self._timers
        if self.cancelled_timers > 100 and self.cancelled_timers * 2 > len(timers):
            self._timers = timers = [timer for timer in timers if not timer[2]._cancelled]
            heapq.heapify(timers)
            self.cancelled_timers = 0
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self.cancelled_timers -= 1
        if not timers:
            raise SimulationStuck(f"nothing is left to happen; waiting: {self._waiting()}")
        now = timers[0][0]
        if now > self._now:
            self._now = now
            self._handles_at_instant = 0
        active = self._active
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            handle.timed = False
            if handle._cancelled:
                self.cancelled_timers -= 1
                continue
            process = handle.process
            process.ready.append(handle)
            if process.idle:
                process.idle = False
                active.append(process)

    def _waiting(self) -> str:
        tasks = sorted((t for t in asyncio.all_tasks(self) if isinstance(t, SimTask)), key=hash)
        return ", ".join(f"{task.process}: {task.get_name()}" for task in tasks) or "no task"

    # Processes

    def process_changed(self, process: SimProcess) -> None:
        """A process was paused, goes on, or is dead."""
        if process in self._active:
            self._active.remove(process)
        process.idle = False
        if process.state is State.DEAD:
            # What is never to run must not be forgotten either: a coroutine that nobody
            # refers to any more is closed, and closing runs its `finally`.
            for task in process.tasks():
                self._hide(task)
            self._dead_handles.append(process.ready)
            process.ready = deque(maxlen=0)
        elif process.state is State.RUNNING:
            if process.ready:
                self._active.append(process)
            else:
                process.idle = True

    def _hide(self, task: SimTask[Any]) -> None:
        """A dead process's: kept, and not to be found by anybody who waits for all tasks."""
        self._dead_tasks.append(task)
        asyncio.tasks._unregister_task(task)

    def close(self) -> None:
        if self.is_closed():
            return
        self.trace.loop = None
        self._bury([*asyncio.all_tasks(self), *self._dead_tasks])
        gc.unfreeze()
        if self._collecting:
            gc.enable()

    def _bury(self, left: list[asyncio.Task[Any]]) -> None:
        """Closes coroutines in silence: their protests and side effects are nobody's."""
        hook, disabled = sys.unraisablehook, logging.root.manager.disable
        sys.unraisablehook = lambda _: None
        logging.disable(logging.CRITICAL)
        self.set_exception_handler(lambda *_: None)
        try:
            super().close()
            for task in left:
                task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
                try:
                    task.get_coro().close()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
                except BaseException:
                    continue
            left.clear()
            self._dead_tasks.clear()
            self._dead_handles.clear()
            self._timers.clear()
            self._active.clear()
            self._processes.clear()
            self._world.ready.clear()
            gc.collect()
        finally:
            sys.unraisablehook = hook
            logging.disable(disabled)


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    exc = context.get("exception")
    text = context["message"] + (f": {exc!r}" if exc is not None else "")
    task = context.get("task") or context.get("future")
    if isinstance(task, SimTask):
        text = f"{task.process} {task.get_name()}: {text}"
    loop.failures.append(text)
    loop.trace.add(f"FAILURE {text}")

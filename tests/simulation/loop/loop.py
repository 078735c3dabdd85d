"""An event loop in virtual time for many simulated processes: their lives, trace, and end."""

import asyncio
import contextvars
import gc
import hashlib
import logging
import random
import sys
import warnings
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tests.simulation.loop.process import (
    PROCESS,
    START_S,
    Scheduler,
    SimHandle,
    SimProcess,
    SimState,
    SimTask,
)

if TYPE_CHECKING:
    from tests.simulation.network.network import Network


class Trace:
    """Lines of (loop time, process, text); costs one comparison while it is off.

    Text must not contain anything that differs between equal runs: addresses of objects, pids.
    """

    def __init__(self, *, on: bool = False):
        self.on = on
        self.loop: VirtualLoop | None = None
        self.lines: list[tuple[float, str, str]] = []

    def add(self, text: str, process: str | None = None) -> None:
        """process: the name in the line; that of the running process if None."""
        if not self.on or self.loop is None:
            return
        name = process or str(self.loop.current_process())
        self.lines.append((self.loop.time(), name, text))

    def digest(self) -> str:
        return hashlib.blake2b(repr(self.lines).encode(), digest_size=8).hexdigest()

    def text(self) -> Iterator[str]:
        """Lines to read: seconds since the start, process, text."""
        for when_s, process, text in self.lines:
            yield f"{when_s - START_S:11.6f}  {process:<14} {text}"


class _Tap(logging.Handler):
    def __init__(self, trace: Trace):
        super().__init__()
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" [{record.exc_info[1]!r}]"
        self._trace.add(f"{record.levelname}: {text}")


@contextmanager
def log_to(trace: Trace) -> Iterator[None]:
    """dynamo_lite's log lines go to `trace` alone, and nowhere while it is off."""
    root = logging.getLogger("dynamo_lite")
    before = (root.handlers[:], root.level, root.propagate, root.manager.disable)
    if trace.on:
        root.handlers[:] = [_Tap(trace)]
        root.setLevel(logging.INFO)
        root.propagate = False
    else:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        root.handlers[:], root.propagate = before[0], before[2]
        root.setLevel(before[1])
        logging.disable(before[3])


T = TypeVar("T")

#: Wall time at START_S, the same in every run.
EPOCH_S = 1_800_000_000.0


@contextmanager
def silence() -> Iterator[None]:
    """Suppresses the errors and logs of coroutines that are closed before their end."""
    hook, disabled = sys.unraisablehook, logging.root.manager.disable
    sys.unraisablehook = lambda _: None
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # Of coroutines that were never started.
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook
        logging.disable(disabled)


def sweep() -> None:
    """Collects objects that outlived their run because of a finaliser; call it between runs.

    The collector ignores the objects that existed before a run.
    """
    with silence():
        gc.collect()


def bury(tasks: list[asyncio.Task[Any]], loop: asyncio.AbstractEventLoop) -> None:
    """Closes the coroutines of `tasks`, empties the list, and collects the garbage.

    loop: of the tasks. No loop is the thread's afterwards.
    """
    # A coroutine's `finally` that awaits `asyncio.gather()` of no tasks asks for the thread's loop,
    # and asyncio would make one that nothing closes.
    asyncio.set_event_loop(loop)
    try:
        for task in tasks:
            task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
            try:
                task.get_coro().close()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
            except BaseException:
                continue
        tasks.clear()
        gc.collect()
    finally:
        asyncio.set_event_loop(None)


class VirtualLoop(Scheduler):
    """Use as a context manager, and run with `run_until_complete`; at most one per thread.

    `close` forgets everything that is left without running any of it to its end.
    While it is open the cyclic garbage collector is off, so that no `finally` of a
    forgotten coroutine runs at a moment that depends on the memory's state.

    """

    def __init__(self, seed: int = 0, *, trace: Trace | None = None):
        super().__init__(random.Random(seed))
        self.seed = seed
        self.trace = trace or Trace()
        self.trace.loop = self
        self.network: Network | None = None  # set by the network that is made for this loop
        #: What asyncio would have logged: callbacks that raised, exceptions of tasks that were
        #: never retrieved.
        self.failures: list[str] = []
        self.tasks_made = 0
        self._wall_jumps: dict[str, float] = {}
        self._processes: dict[str, SimProcess] = {}
        self._dead_tasks: list[SimTask[Any]] = []
        self._dead_handles: list[deque[SimHandle]] = []
        self.world = SimProcess(self, "world", 0, "world")
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

    def current_process(self) -> SimProcess:
        """The process whose code is running; "world" outside of all others."""
        return PROCESS.get(self.world)

    def wall(self, host: str) -> float:
        """Seconds since the epoch, as the clock of `host` shows them."""
        return self._now - START_S + EPOCH_S + self._wall_jumps.get(host, 0.0)

    def jump_wall(self, host: str, seconds: float) -> None:
        """Sets the wall clock of `host` forward or back; monotonic time does not change."""
        self._wall_jumps[host] = self._wall_jumps.get(host, 0.0) + seconds

    def stream(self, name: str) -> random.Random:
        """A random source of its own, from this loop's seed."""
        return random.Random(f"{self.seed}/{name}")

    def fingerprint(self) -> str:
        """Equal for equal runs: how far they came, and every random choice so far."""
        return f"{self._now!r}/{self.handles_run}/{self.tasks_made}/{self.rng.getrandbits(64):x}"

    # What asyncio asks of a loop

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
            process = PROCESS.get(self.world)
        else:
            process = context.get(PROCESS, self.world)
        task.process = process
        if process.state is SimState.DEAD:
            self._hide(task)
        return task

    async def create_server(self, *args: Any, **named: Any) -> Any:
        return self._network.create_server(*args, **named)

    async def create_connection(self, *args: Any, **named: Any) -> Any:
        return await self._network.create_connection(*args, **named)

    async def create_unix_connection(self, *args: Any, **named: Any) -> Any:
        return await self._network.create_unix_connection(*args, **named)

    @property
    def _network(self) -> "Network":
        if self.network is None:
            raise OSError("this loop has no network")
        return self.network

    # Processes

    def tasks_of(self, process: SimProcess) -> list[SimTask[Any]]:
        """Those of its tasks that are not done, oldest first."""
        # A set of all the loop's tasks, as `asyncio.all_tasks` makes, costs more. From Python 3.12
        # on there is nothing else.
        alive = getattr(asyncio.tasks, "_all_tasks", None)
        known = (*(asyncio.all_tasks(self) if alive is None else alive), *self._dead_tasks)
        tasks = (task for task in known if isinstance(task, SimTask))
        return sorted((t for t in tasks if t.process is process and not t.done()), key=hash)

    def process_changed(self, process: SimProcess) -> None:
        super().process_changed(process)
        if process.state is SimState.DEAD:
            # The tasks must stay referenced: a coroutine without references is closed, and
            # closing runs its `finally`.
            for task in process.tasks():
                self._hide(task)
            self._dead_handles.append(process.ready)
            process.ready = deque(maxlen=0)

    def _hide(self, task: SimTask[Any]) -> None:
        """Keeps a task of a dead process, and removes it from asyncio's list of all tasks."""
        self._dead_tasks.append(task)
        asyncio.tasks._unregister_task(task)

    def close(self) -> None:
        if self.is_closed():
            return
        self.trace.loop = None
        left = [*asyncio.all_tasks(self), *self._dead_tasks]
        with silence():
            self.set_exception_handler(lambda *_: None)
            super().close()
            for table in (self._dead_tasks, self._dead_handles, self._timers, self._active):
                table.clear()
            self._processes.clear()
            self.world.ready.clear()
            self.network = None
            bury(left, self)
        gc.unfreeze()
        if self._collecting:
            gc.enable()


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    exc = context.get("exception")
    text = context["message"] + (f": {exc!r}" if exc is not None else "")
    task = context.get("task") or context.get("future")
    if isinstance(task, SimTask):
        text = f"{task.process} {task.get_name()}: {text}"
    loop.failures.append(text)
    loop.trace.add(f"FAILURE {text}")

"""An event loop in virtual time for many simulated processes: their lives, and the end."""

import asyncio
import contextvars
import gc
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from tests.simulation.loop.handles import SimHandle, SimTask
from tests.simulation.loop.process import PROCESS, SimProcess, SimState
from tests.simulation.loop.scheduler import START_S, Scheduler, SimulationStuck
from tests.simulation.loop.teardown import bury, silence
from tests.simulation.loop.trace import Trace

__all__ = ["START_S", "SimulationStuck", "VirtualLoop"]

T = TypeVar("T")

#: Wall time at START_S, the same in every run.
EPOCH_S = 1_800_000_000.0


class Network(Protocol):
    """What the loop needs of a network to offer TCP (`simulation/network/network.py`)."""

    def create_server(
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> asyncio.AbstractServer: ...

    async def create_connection(
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Raises OSError."""
        ...

    async def create_unix_connection(
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], path: str
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Raises OSError."""
        ...


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

    @property
    def processes(self) -> dict[str, SimProcess]:
        """The newest incarnation of each name, dead or not."""
        return self._processes

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
    ) -> asyncio.AbstractServer:
        return self._network.create_server(protocol_factory, host or "127.0.0.1", port or 0)

    async def create_connection(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        **_: Any,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        return await self._network.create_connection(protocol_factory, host or "", port or 0)

    async def create_unix_connection(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        path: str | None = None,
        **_: Any,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        return await self._network.create_unix_connection(protocol_factory, path or "")

    @property
    def _network(self) -> Network:
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

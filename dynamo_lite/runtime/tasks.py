"""Ownership of asyncio tasks: who starts a task ends it, and a failure is never silent."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Self, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Pause between two cancels of a task that has not ended. It is longer than the timeouts of
#: what tasks do on their way out (5 s at most), so that only lost cancels are repeated.
CANCEL_AGAIN_S = 10.0

#: Takes a task that has ended with an exception, and that exception.
OnFailure = Callable[[asyncio.Task[Any], BaseException], None]


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels `tasks` and returns when all of them have ended. Their results stay unread.

    A single cancel is not enough: on Python 3.11 `asyncio.wait_for` returns its result and
    drops a cancel that comes in the same turn of the event loop, and libraries use it. So
    the cancel is repeated every `CANCEL_AGAIN_S`. When the caller is cancelled meanwhile, that
    cancel is passed on to the tasks, and raised here after they have ended.
    """
    if asyncio.current_task() in tasks:
        raise RuntimeError("a task cannot wait for its own end: end it from its owner's task")
    running = [task for task in tasks if not task.done()]
    cancelled: asyncio.CancelledError | None = None
    while running:
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError as exc:
            cancelled = exc
        running = [task for task in running if not task.done()]
    if cancelled is not None:
        raise cancelled


async def all_of(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Waits until all are set, `timeout_s` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for event in events:
                await event.wait()


async def first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None = None) -> None:
    """Waits until one coroutine has ended, `timeout_s` at most; cancels the others.

    Raises what one has raised, of several the first in the order of the arguments.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*tasks)
        failures = [exc for task in tasks if not task.cancelled() and (exc := task.exception())]
    for exc in failures:
        raise exc


def log_failure(task: asyncio.Task[Any], exc: BaseException) -> None:
    """The OnFailure of an owner that continues without the task."""
    logger.error("task %s failed", task.get_name(), exc_info=exc)


class OwnedTasks:
    """The tasks of one owner. An async context manager: leaving it ends them, as does `end`.

    on_failure: called in the event loop as soon as a task has failed; the others continue.
    """

    def __init__(self, on_failure: OnFailure = log_failure):
        self._on_failure = on_failure
        # A dict and not a set: tasks are ended in the order of their start.
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    def start(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """Runs `coro` as a task. Must be called in the event loop. See `asyncio.create_task`."""
        task = asyncio.create_task(coro, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def join(self) -> None:
        """Returns when no task is left. If the wait is cancelled, the tasks are ended."""
        try:
            while self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            await self.end()
            raise

    def cancel(self) -> None:
        """Cancels all tasks once, for callers that cannot wait here. `end` waits for them."""
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        """Ends all tasks; see `end_tasks`."""
        while self._tasks:
            await end_tasks(*self._tasks)
            if self._tasks:  # the callbacks of ended tasks have not been called yet
                await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._on_failure(task, exc)


class needed:
    """A context whose body needs tasks of other owners: entering it returns their `OnFailure`.

    When one of them fails, the body is cancelled, and the context raises that failure. All failures
    are logged; those after the first one, and after the body, only that.
    """

    def __init__(self) -> None:
        self._body: asyncio.Task[Any] | None = None
        self._cancels = 0
        self._failure: BaseException | None = None

    async def __aenter__(self) -> OnFailure:
        self._body = asyncio.current_task()
        assert self._body is not None
        self._cancels = self._body.cancelling()
        return self._failed

    async def __aexit__(self, *_: object) -> None:
        body, self._body = self._body, None
        if self._failure is None or body is None:
            return
        if body.uncancel() <= self._cancels:  # otherwise its owner has cancelled it, too
            raise self._failure

    def _failed(self, task: asyncio.Task[Any], exc: BaseException) -> None:
        log_failure(task, exc)
        if self._failure is None and self._body is not None:
            self._failure = exc
            self._body.cancel()


class running(Generic[T]):
    """Runs `coro` as a task while the context lasts; its failure does not end the context.

    A class and not a generator: the event loop closes forgotten async generators, and this one
    would then wait for tasks of an owner that was killed in a simulation.
    """

    def __init__(
        self, coro: Coroutine[Any, Any, T], *, name: str, on_failure: OnFailure = log_failure
    ):
        self._coro, self._name = coro, name
        self._tasks = OwnedTasks(on_failure)

    async def __aenter__(self) -> asyncio.Task[T]:
        return self._tasks.start(self._coro, name=self._name)

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()

"""Cancels a coroutine at every one of its suspensions, one run in virtual time for each."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

import pytest

from dynamo_lite.runtime.tasks import end_tasks
from tests.unit import virtual

T = TypeVar("T")

#: Names of tasks that the work of an owner starts for others: they may outlive it a little.
_OF_OTHERS = ("handle ", "connect ", "generate-abort", "abort ", "pump ", "other")
#: More suspensions than any scene has: a coroutine that never ends fails its test.
_MOST = 500


class Cancel:
    """Runs a coroutine as a task, and cancels the task at its `at`-th suspension.

    woken: the cancel comes in the turn of the loop in which what the task awaits is done. So the
    result is there, and the task does not get it. Otherwise it comes as the task begins to wait.
    """

    def __init__(self, at: int, *, woken: bool):
        self.at, self.woken = at, woken
        self.suspensions = 0
        self._over = False
        #: What is done instead of the cancel, if set: by another task, so a callback calls it.
        self.action: Callable[[], object] | None = None
        #: Where the task was when it was cancelled; empty if it had ended before.
        self.place = ""

    def __repr__(self) -> str:
        when = "its result being there" if self.woken else "as it began to wait"
        return f"cancelled at suspension {self.at}, {when}, {self.place or 'nowhere'}"

    async def owner(
        self, work: Coroutine[Any, Any, T], until: Coroutine[Any, Any, None] | None = None
    ) -> T | None:
        """Returns the result of `work`, or None after the cancel. The cancel must end `work`.

        until: for work that does not end by itself: it is not cancelled any more when this ends.
        """
        before = asyncio.all_tasks()
        task = asyncio.create_task(self.step(work), name="owner")
        others = [] if until is None else [asyncio.create_task(until, name="until")]
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
        if not self.place and not task.done():
            self._over = True
            task.cancel()
        await asyncio.wait([task])
        await end_tasks(*others)
        if self.place or self._over:
            assert task.cancelled(), f"a cancel was dropped, the end is {task}"
            await _no_tasks_but(before)
            return None
        return task.result()

    async def step(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work` in the current task, and counts on; the caller judges how it ends."""
        task = asyncio.current_task()
        assert task is not None
        return await _Stepped(work, self._suspended, task)

    def _suspended(
        self, work: Coroutine[Any, Any, Any], waits_for: Any, task: asyncio.Task[Any]
    ) -> None:
        self.suspensions += not self._over
        if self._over or self.suspensions != self.at:
            return
        if self.woken and isinstance(waits_for, asyncio.Future):
            # Called before the task's own callback, which is added after this.
            waits_for.add_done_callback(lambda _: self._cancel(work, task))
        else:
            self._cancel(work, task)

    def _cancel(self, work: Coroutine[Any, Any, Any], task: asyncio.Task[Any]) -> None:
        if task.done() or self._over:
            return
        self.place = _place(work)
        if self.action is None:
            task.cancel()
        elif asyncio.current_task() is None:
            self.action()
        else:
            asyncio.get_running_loop().call_soon(self.action)


class _Stepped(Awaitable[T], Generic[T]):
    """Awaits `work`; calls `suspended` whenever it suspends, with what it waits for."""

    def __init__(
        self,
        work: Coroutine[Any, Any, T],
        suspended: Callable[[Coroutine[Any, Any, Any], Any, asyncio.Task[Any]], None],
        task: asyncio.Task[Any],
    ):
        self._work, self._suspended, self._task = work, suspended, task

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        try:
            waits_for = next(steps)
            while True:
                self._suspended(self._work, waits_for, self._task)
                try:
                    sent = yield waits_for
                except BaseException as exc:
                    waits_for = steps.throw(exc)
                else:
                    waits_for = steps.send(sent)
        except StopIteration as end:
            return end.value


async def _no_tasks_but(before: set[asyncio.Task[Any]]) -> None:
    for _ in range(20):  # tasks that were just cancelled need a few turns to end
        await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() - before if not task.done()]
    left = [task for task in left if not task.get_name().startswith(_OF_OTHERS)]
    assert not left, f"left running by its owner: {left}"


def _place(work: Any) -> str:
    """The innermost line of this project where the coroutine is suspended."""
    place = ""
    while work is not None:
        frame = getattr(work, "cr_frame", None) or getattr(work, "ag_frame", None)
        if frame is not None and "dynamo_lite" in frame.f_code.co_filename:
            name = frame.f_code.co_filename.rpartition("dynamo_lite/")[2]
            place = f"{name}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        work = getattr(work, "cr_await", None) or getattr(work, "ag_await", None)
    return place or "in the test"


def at_every_await(at_least: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """The decorated coroutine function as a test that is run for each suspension of the work that
    it gives to `Cancel.owner`, until that work ends by itself.

    at_least: how many suspensions there are; with less the test has lost its subject.
    """

    def decorated(script: Callable[[Cancel], Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def test(woken: bool) -> None:
            cancel_everywhere(script, at_least=at_least, woken=woken)

        test.__name__, test.__doc__ = script.__name__, script.__doc__
        test.__module__, test.__qualname__ = script.__module__, script.__qualname__
        return both_moments(test)

    return decorated


#: For tests that call `cancel_everywhere` themselves.
both_moments = pytest.mark.parametrize("woken", [False, True], ids=["waiting", "woken"])


def cancel_everywhere(
    script: Callable[[Cancel], Coroutine[Any, Any, None]], *, at_least: int, woken: bool
) -> None:
    """See `at_every_await`."""
    cancelled = 0
    for at in itertools.count(1):
        assert at < _MOST, "the work has no end"
        cancel = Cancel(at, woken=woken)
        try:
            virtual.run(script(cancel))
        except BaseException as exc:
            exc.add_note(repr(cancel))
            raise
        if cancel.suspensions < at:
            break
        cancelled += bool(cancel.place)
    assert cancelled >= at_least, f"cancelled {cancelled} times only"

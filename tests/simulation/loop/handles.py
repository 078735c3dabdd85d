"""Handles and tasks of the virtual loop: each has a reference to its process."""

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.simulation.loop.loop import VirtualLoop
    from tests.simulation.loop.process import SimProcess

T = TypeVar("T")


class SimHandle(asyncio.Handle):
    """As asyncio's, without debug mode."""

    __slots__ = ("process", "timed", "when_s")

    #: The process whose code it runs.
    process: "SimProcess"
    #: Whether it is a timer that is not due yet; written by the loop.
    timed: bool
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
        self.timed = False

    def __repr__(self) -> str:
        state = "cancelled" if self._cancelled else getattr(self._callback, "__qualname__", "?")
        return f"<SimHandle {self.process} {state}>"

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            # The loop calls it without a look at `_cancelled`.
            self._callback = _nothing
            self._args = ()
            if self.timed:
                self.process.loop.cancelled_timers += 1

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

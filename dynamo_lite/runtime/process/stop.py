"""The stop request of a process, its signals and its exit codes."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvloop

from dynamo_lite.runtime.store import LeaseLoss

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_STOPPED = 0
EXIT_START_FAILED = 1
EXIT_OWNED_TASK_FAILED = 70
EXIT_LEASE_EXPIRED = 75
EXIT_FORCED = 130

HUNG_S = 120.0


def loss_exit_code(loss: LeaseLoss) -> int:
    """75 makes the supervisor start a new process; after a revocation it must not."""
    return EXIT_LEASE_EXPIRED if loss is LeaseLoss.EXPIRED else EXIT_STOPPED


def end_process() -> None:
    """For threads beside the main one, whose exceptions would not reach it."""
    os._exit(EXIT_OWNED_TASK_FAILED)


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` in an event loop of its own. Ends the process, with the stacks of its threads on
    stderr, when that has not run for `HUNG_S`: its lease is lost then, and its supervisor starts
    another one."""
    ended = threading.Event()

    async def watched() -> T:
        args = asyncio.get_running_loop(), ended
        threading.Thread(target=_watch, args=args, name="watchdog", daemon=True).start()
        try:
            return await main
        finally:
            ended.set()

    return uvloop.run(watched())


def _watch(loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
    unanswered = 0

    def answered() -> None:
        nonlocal unanswered
        unanswered = 0

    # Turns and no time: one that was stopped (SIGSTOP) had none, and its loop runs again.
    while not ended.wait(HUNG_S / 10) and unanswered < 10:
        unanswered += 1
        loop.call_soon_threadsafe(answered)
    if not ended.is_set():
        faulthandler.dump_traceback()
        os._exit(1)


class Interrupted(Exception):
    """A stop was requested during `StopRequest.interrupts`."""


class StopRequest:
    """Set once: only the first reason counts."""

    def __init__(self) -> None:
        self.reason = ""
        self.code = EXIT_STOPPED
        self._event = asyncio.Event()
        self._on_set: Callable[[], object] = lambda: None

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self, reason: str, code: int) -> None:
        if not self.is_set:
            self.reason, self.code = reason, code
            self._event.set()
            self._on_set()

    async def wait(self) -> None:
        await self._event.wait()

    @contextlib.asynccontextmanager
    async def interrupts(self) -> AsyncIterator[None]:
        """Cancels the body when a stop is requested, and raises Interrupted instead."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._on_set = lambda: limit.reschedule(0)
                if self.is_set:
                    limit.reschedule(0)
                try:
                    yield
                finally:
                    self._on_set = lambda: None
        except TimeoutError:
            if limit.expired():
                raise Interrupted from None
            raise


@contextlib.contextmanager
def stop_on_signals(
    stop: StopRequest, again: Callable[[], object] = lambda: os._exit(EXIT_FORCED)
) -> Iterator[None]:
    """The first signal requests a drain, the second one calls `again`: the process ends at once.

    A closed terminal is a signal, too, unless it is ignored, as under `nohup`.
    """
    loop = asyncio.get_running_loop()
    seen = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal seen
        if seen:
            again()
        seen = True
        stop.set(number.name, EXIT_STOPPED)

    installed: list[signal.Signals] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Shells start background jobs with an ignored SIGINT, which is no wish to ignore it.
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        # Only the main thread's loop can handle signals; elsewhere the owner calls `stop`.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, on_signal, number)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)

"""The end of a run: everything left of it is dropped without logs or warnings."""

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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

"""The end of a run: what is left of it is forgotten, and nobody hears of it."""

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
    """What coroutines protest when they are closed in the middle is nobody's."""
    hook, disabled = sys.unraisablehook, logging.root.manager.disable
    sys.unraisablehook = lambda _: None
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # Some of them have never begun.
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook
        logging.disable(disabled)


def sweep() -> None:
    """Collects what outlived its run because a finaliser held it; call it between runs.

    Each run hides from the collector what was there before it.
    """
    with silence():
        gc.collect()


def bury(tasks: list[asyncio.Task[Any]]) -> None:
    """Closes what `tasks` were at, empties the list, and collects the garbage."""
    for task in tasks:
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
        try:
            task.get_coro().close()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        except BaseException:
            continue
    tasks.clear()
    gc.collect()

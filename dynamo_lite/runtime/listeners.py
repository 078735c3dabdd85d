"""Callbacks that are called when something has changed."""

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, ParamSpec

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class Listeners(Generic[P]):
    """Calls each callback in the order in which they were added.

    A callback that raises is logged, and the others are still called. owner: for the log.
    """

    def __init__(self, owner: str):
        self._owner = owner
        self._callbacks: list[Callable[P, object]] = []

    def add(self, callback: Callable[P, object]) -> AbstractContextManager[object]:
        """Adds `callback` at once. Leaving the returned context removes it again."""
        self._callbacks.append(callback)
        removed = contextlib.ExitStack()
        removed.callback(self._callbacks.remove, callback)
        return removed

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for callback in list(self._callbacks):
            try:
                callback(*args, **kwargs)
            except Exception:
                logger.exception("a listener of %s failed", self._owner)

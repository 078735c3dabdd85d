"""The event loop beside an engine, for its connections to NATS, etcd and the queue.

The scheduler half runs in a thread of the engine and must not block. Everything that
waits runs on an event loop in a thread of its own. The engine reaches it with `call`.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import uvloop

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.process.stop import EXIT_OWNED_TASK_FAILED, end_process

logger = logging.getLogger(__name__)

_JOIN_S = 5.0

#: Opens the connections of a scheduler half.
OpenSession = Callable[[], AbstractAsyncContextManager[Any]]


class Bridge(Protocol):
    """Runs a session as a context, from `start` until `close`."""

    def start(self, timeout_s: float) -> None:
        """Returns when the session has been entered. Raises StartupError."""
        ...

    def call(self, callback: Callable[[], None]) -> None:
        """Calls it in the bridge's event loop, soon. Never blocks."""
        ...

    def close(self) -> None: ...


#: Returns the bridge of a session.
OpenBridge = Callable[[OpenSession], Bridge]


class ThreadBridge:
    """Runs the session in an event loop of its own thread.

    end_process: called in that thread when the session has ended without `close`. An engine without
    its session would hold blocks, and never learn what becomes of its requests: its process ends,
    and the worker is started again.
    """

    def __init__(self, session: OpenSession, *, end_process: Callable[[], None] = end_process):
        self._session, self._end_process = session, end_process
        self._closing = False
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dynamo-lite-bridge", daemon=True)

    def start(self, timeout_s: float) -> None:
        """See `Bridge`."""
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise StartupError(
                f"timeout: the engine's bridge did not connect within {timeout_s:g} s"
            )
        if self._failure is not None:
            raise StartupError(f"the engine's bridge failed: {self._failure}") from self._failure

    def call(self, callback: Callable[[], None]) -> None:
        """See `Bridge`. A failure is logged."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process shuts down
            self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        self._closing = True
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._main())
        except BaseException as exc:
            self._failure = exc
        if self._ready.is_set() and not self._closing:
            logger.critical(
                "the engine's bridge has ended, and so does this process, with exit code %d: %r",
                EXIT_OWNED_TASK_FAILED,
                self._failure,
            )
            self._end_process()
        elif self._failure is not None:
            logger.error("the engine's bridge failed: %r", self._failure)
        self._ready.set()
        self._loop.close()

    async def _main(self) -> None:
        async with self._session():
            self._ready.set()
            await self._stop.wait()

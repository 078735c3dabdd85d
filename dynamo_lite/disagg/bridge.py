"""The engine process's own connection to the outside.

The scheduler half runs in a thread that belongs to the engine; everything that
waits (NATS, etcd, the queue) runs on an event loop in a thread of ours. The two
meet in `submit` (engine to loop, never blocks) and in whatever locked state the
caller shares.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

_JOIN_S = 5.0


#: Opens what the scheduler half needs of the outside.
Session = Callable[[], AbstractAsyncContextManager[Any]]


class Bridge(Protocol):
    """Runs a session as a context, from `start` until `close`."""

    def start(self, timeout_s: float) -> None:
        """Returns when the session is entered. Raises StartupError."""
        ...

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs it beside the session, owned by the bridge. Never blocks."""
        ...

    def close(self) -> None: ...


#: Makes the bridge of a session.
OpenBridge = Callable[[Session], Bridge]


class ThreadBridge:
    """Runs the session in a thread's event loop."""

    def __init__(self, session: Session):
        self._session = session
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._tasks = OwnedTasks()
        self._thread = threading.Thread(target=self._run, name="dynamo-lite-bridge", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Returns when the session is entered. Raises StartupError."""
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise StartupError(f"the engine's bridge was not connected within {timeout_s:g} s")
        if self._failure is not None:
            raise StartupError(f"the engine's bridge failed: {self._failure}") from self._failure

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs it on the loop, owned by the bridge; failures are logged."""
        try:
            self._loop.call_soon_threadsafe(self._own, coroutine)
        except RuntimeError:  # the loop is closed: the process is on its way out
            coroutine.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_JOIN_S)

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.start(coroutine, name="bridge work")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as exc:
            self._failure = exc
            logger.error("the engine's bridge ended: %s", exc)
        finally:
            self._ready.set()
            self._loop.close()

    async def _main(self) -> None:
        async with self._session(), self._tasks:
            self._ready.set()
            await self._stop.wait()

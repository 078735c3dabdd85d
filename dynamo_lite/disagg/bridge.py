"""The event loop beside an engine, for its connections to NATS, etcd and the queue.

The scheduler half runs in a thread of the engine and must not block. Everything that
waits runs on an event loop in a thread of its own. The two share `submit` (engine to loop,
never blocks) and the locked state of the caller.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import uvloop

from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.disagg.queue.base import PrefillQueue, QueueConfig
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.process.stop import EXIT_OWNED_TASK_FAILED, end_process
from dynamo_lite.runtime.store import Store
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

_JOIN_S = 5.0

#: Opens the connections of a scheduler half.
OpenSession = Callable[[], AbstractAsyncContextManager[Any]]


class Bridge(Protocol):
    """Runs a session as a context, from `start` until `close`."""

    def start(self, timeout_s: float) -> None:
        """Returns when the session has been entered. Raises StartupError."""
        ...

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs the coroutine as a task of the bridge. Never blocks."""
        ...

    def close(self) -> None: ...


class ServerClients(Protocol):
    """Each call opens a client of its own, as a context."""

    def messaging(self) -> AbstractAsyncContextManager[Messaging]: ...

    def store(self) -> AbstractAsyncContextManager[Store]: ...

    def queue(self, config: QueueConfig) -> AbstractAsyncContextManager[PrefillQueue]: ...


class NatsEtcdClients:
    """Implements `ServerClients` with NATS and etcd at the URLs of the engine's config."""

    def __init__(self, config: EngineConfig):
        self._config = config

    def messaging(self) -> NatsMessaging:
        return NatsMessaging(self._config.nats_url)

    def store(self) -> EtcdStore:
        return EtcdStore(self._config.etcd_url)

    def queue(self, config: QueueConfig) -> PrefillQueue:
        return JetStreamQueue(self._config.nats_url, self._config.namespace, config)


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
        self._tasks = OwnedTasks()
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

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """See `Bridge`. Failures are logged."""
        try:
            self._loop.call_soon_threadsafe(
                lambda: self._tasks.start(coroutine, name="bridge work")
            )
        except RuntimeError:  # the loop is closed: the process shuts down
            coroutine.close()

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
        async with self._session(), self._tasks:
            self._ready.set()
            await self._stop.wait()

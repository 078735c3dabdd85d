"""A nats-server or etcd of one user's own, which may be killed, frozen, and come back."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

from nats.js import JetStreamContext

from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats

#: How long SIGSTOP may take to stop all threads of a server.
_STOPPED_S = 5.0


class Server(Protocol):
    """A server that a test may kill and start again, a real or a simulated one."""

    @property
    def url(self) -> str: ...

    async def kill(self) -> None: ...

    async def restart(self) -> None: ...


class PrivateServer:
    """Keeps its port over restarts. Call `start` first, and `stop` at the end."""

    def __init__(self, kind: Callable[..., EmbeddedEtcd | EmbeddedNats], directory: Path):
        """kind: makes the server for a directory and, with `port=`, for a given port."""
        self._kind = kind
        self._directory = directory
        self._server = kind(directory)
        self._running = False
        self._frozen = False

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def answers(self) -> bool:
        """Whether it runs, and is not frozen."""
        return self._running and not self._frozen

    async def start(self) -> None:
        await self._server.__aenter__()
        self._running = True

    async def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        os.kill(self._server.pid, signal.SIGKILL)
        self._frozen = False
        await self._server.exited()
        await self.stop()

    async def stop(self) -> None:
        if self._running:
            self.thaw()
            self._running = False
            await self._server.__aexit__(None, None, None)

    async def restart(self, *, wiped: bool = False) -> None:
        """Starts again on the same port, on the same data unless `wiped`."""
        await self.stop()
        if wiped:
            shutil.rmtree(self._directory)
        self._server = self._kind(self._directory, port=self._server.port)
        await self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, and nothing is answered."""
        os.kill(self._server.pid, signal.SIGSTOP)
        self._frozen = True
        deadline = time.monotonic() + _STOPPED_S
        # The signal may take effect later: a thread on another core answers until then.
        while not _has_stopped(self._server.pid):
            assert time.monotonic() < deadline, "the server did not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server.pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def private_server(
    kind: Callable[..., EmbeddedEtcd | EmbeddedNats], directory: Path
) -> AsyncIterator[PrivateServer]:
    """One that runs; at the end it is stopped."""
    server = PrivateServer(kind, directory)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def _has_stopped(pid: int) -> bool:
    """Whether all threads of the process have stopped."""
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)


@contextlib.asynccontextmanager
async def jetstream_of(url: str) -> AsyncIterator[JetStreamContext]:
    """What an operator sees and deletes, on a connection of its own."""
    async with NatsMessaging(url) as messaging:
        yield messaging.client.jetstream()

"""Real servers, unique names, and the check that a test leaves no task behind."""

import asyncio
import contextlib
import os
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats
from tests.external import Certificates


class PrivateServer:
    """A server of one test's own, which may be killed and come back on its port."""

    def __init__(self, kind: type[EmbeddedEtcd] | type[EmbeddedNats], directory: Path):
        self._kind = kind
        self._directory = directory
        self._generation = 0
        self._server = kind(directory / "0")
        self._running = False

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int:
        return self._server.pid

    async def start(self) -> None:
        await self._server.__aenter__()
        self._running = True

    async def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        os.kill(self._server.pid, signal.SIGKILL)
        await self.stop()

    async def stop(self) -> None:
        if self._running:
            self._running = False
            await self._server.__aexit__(None, None, None)

    async def restart(self, *, wiped: bool = False) -> None:
        """Starts again on the same port, on the same data unless `wiped`."""
        await self.stop()
        self._generation += wiped
        directory = self._directory / str(self._generation)
        self._server = self._kind(directory, port=self._server.port)
        await self.start()


@contextlib.contextmanager
def running(server: EmbeddedEtcd | EmbeddedNats) -> Iterator[str]:
    """Runs a server from a thread with a loop of its own, so that any fixture may ask for it."""
    started: Future[str] = Future()
    stop = threading.Event()

    async def run() -> None:
        async with server:
            started.set_result(server.url)
            await asyncio.to_thread(stop.wait)

    def body() -> None:
        try:
            asyncio.run(run())
        except BaseException as exc:
            if started.done():
                raise
            started.set_exception(exc)

    thread = threading.Thread(target=body, name=server.name)
    thread.start()
    try:
        yield started.result(timeout=60)
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(EmbeddedNats(tmp_path_factory.mktemp("nats"))) as url:
        yield url


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(EmbeddedEtcd(tmp_path_factory.mktemp("etcd"))) as url:
        yield url


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    server = PrivateServer(EmbeddedNats, tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def etcd_server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    server = PrivateServer(EmbeddedEtcd, tmp_path / "etcd")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.make()
    return made


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"t-{secrets.token_hex(3)}"


@pytest.fixture
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Fails the test if it leaves an asyncio task running."""
    before = asyncio.all_tasks()
    yield
    # Tasks that were just cancelled need a few turns of the loop to end.
    for _ in range(20):
        current = {asyncio.current_task()}
        left = {task for task in asyncio.all_tasks() - before - current if not task.done()}
        if not left:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"left running: {sorted(task.get_name() for task in left)}: {left}")

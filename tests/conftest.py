"""Real servers, unique names, and the check that a test leaves no task behind."""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats


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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with EmbeddedNats(tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with EmbeddedEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server.url


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

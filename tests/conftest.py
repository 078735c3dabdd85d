"""Real servers, unique names, and the check that a test leaves no task behind."""

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import hypothesis
import pytest

from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats
from tests.external import Certificates
from tests.joining import Cluster, cluster
from tests.servers import PrivateServer, private_server

pytest_plugins = ("tests.heap",)

#: Files that take minutes, longest first. One that began last would leave cores without work.
_LONGEST = (
    "sim/test_many_seeds.py",
    "hosts/test_hosts.py",
    "sim/test_mutants.py",
    "process/test_benchmarks.py",
    "process/test_planner.py",
    "process/test_rights.py",
    "process/test_termination.py",
    "process/test_package.py",
    "process/test_serve_cli.py",
)

#: A test that takes longer belongs into a file that is marked `heavy`. With `CI=true` it fails.
_LONGEST_TEST_S, _LONGEST_WITH_ENGINES_S = 15.0, 45.0


def pytest_configure() -> None:
    # A package that vLLM's app imports raises the root's level to ERROR.
    logging.getLogger("dynamo_lite").setLevel(logging.INFO)
    # A process that gets no core for a while is no fault of an example.
    hypothesis.settings.register_profile("unhurried", hypothesis.settings.default, deadline=None)
    hypothesis.settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns = {str(Path(__file__).parent / name): turn for turn, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: turns.get(str(item.path), len(turns)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test of the core that takes too long fails, where the machine is not a developer's."""
    report = yield
    judged = os.environ.get("CI") == "true" and call.when == "call" and report.passed
    with_engines = item.path.parent.name == "vllm"
    longest_s = _LONGEST_WITH_ENGINES_S if with_engines else _LONGEST_TEST_S
    # As much more as the machine has more running processes than cores.
    longest_s *= max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if judged and call.duration > longest_s and item.get_closest_marker("heavy") is None:
        report.outcome = "failed"
        report.longrepr = (
            f"took {call.duration:.0f} s, and a test that is not marked `heavy` has"
            f" {longest_s:.0f} s: make it shorter, or mark its file"
        )
    return report


class HasUrl(Protocol):
    @property
    def url(self) -> str: ...


@contextlib.contextmanager
def running(server: AbstractAsyncContextManager[HasUrl]) -> Iterator[str]:
    """Runs a server from a thread with a loop of its own, so that any fixture may ask for it."""
    started: Future[str] = Future()
    stop = threading.Event()

    async def run() -> None:
        async with server as entered:
            started.set_result(entered.url)
            await asyncio.to_thread(stop.wait)

    def body() -> None:
        try:
            asyncio.run(run())
        except BaseException as exc:
            if started.done():
                raise
            started.set_exception(exc)

    thread = threading.Thread(target=body, name=f"runs {server}")
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
    async with private_server(EmbeddedNats, tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def other_nats_server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    async with private_server(EmbeddedNats, tmp_path / "other_nats") as server:
        yield server


@pytest.fixture
async def etcd_server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    async with private_server(EmbeddedEtcd, tmp_path / "etcd") as server:
        yield server


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
async def c(namespace: str, etcd_url: str, nats_url: str) -> AsyncIterator[Cluster]:
    """Joined engines and Forwarders."""
    async with cluster(namespace, etcd_url, nats_url) as made:
        yield made


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

"""Releases side by side in one graph: one that fits joins, serves and leaves; another is refused.

The other releases are wheels of this checkout, installed and patched to another version.
"""

import asyncio
import re
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dynamo_lite import __version__
from dynamo_lite.protocol.codec import WIRE_VERSION
from tests.builders import eventually, members_when
from tests.process.command import Serving, run, serving
from tests.process.dispatcher import dispatching
from tests.process.null_graph import copy_to
from tests.process.wheels import Installation, build, source

pytestmark = pytest.mark.heavy

WORKER = "tests.process.null_graph:Worker"
INSTALLED_WORKER = "null_graph:Worker"


def patch(installation: Installation, file: str, pattern: str, replacement: str) -> None:
    path = installation.site / "dynamo_lite" / file
    text, found = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    assert found == 1
    path.write_text(text)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    [wheel] = build(source(folder / "source"), folder / "dist", "--wheel")
    return wheel


@pytest.fixture
def older(wheel: Path, tmp_path: Path) -> Installation:
    installation = Installation(tmp_path / "older", wheel)
    patch(installation, "__init__.py", "^__version__ = .*$", '__version__ = "0.1.9"')
    return installation


@pytest.fixture
def newer(wheel: Path, tmp_path: Path) -> Installation:
    """Its messages mean something else."""
    installation = Installation(tmp_path / "newer", wheel)
    patch(installation, "__init__.py", "^__version__ = .*$", '__version__ = "9.0.0"')
    patch(
        installation,
        "protocol/codec.py",
        r"^WIRE_VERSION = \d+$",
        f"WIRE_VERSION = {WIRE_VERSION + 1}",
    )
    return installation


Start = Callable[..., AbstractContextManager[Serving]]


@pytest.fixture
def servers(nats_url: str, etcd_url: str, namespace: str) -> tuple[str, ...]:
    return ("--nats-url", nats_url, "--etcd-url", etcd_url, "--namespace", namespace)


def folder_of(installation: Installation) -> Path:
    """An empty folder with the graph."""
    folder = installation.folder.with_name(f"{installation.folder.name}-cwd")
    folder.mkdir()
    copy_to(folder)
    return folder


def start(installation: Installation, servers: tuple[str, ...]) -> AbstractContextManager[Serving]:
    folder = folder_of(installation)
    return serving(
        folder / "state",
        *servers,
        *("--service-name", "VllmWorker"),
        graph=INSTALLED_WORKER,
        command=installation.command,
        cwd=folder,
        env=installation.environment,
    )


async def test_a_worker_of_the_release_before_joins_serves_and_leaves(
    older: Installation, servers: tuple[str, ...], etcd_url: str, namespace: str, tmp_path: Path
) -> None:
    own = serving(tmp_path / "own", *servers, "--service-name", "VllmWorker", graph=WORKER)
    with own as current, start(older, servers) as other:
        await asyncio.to_thread(current.wait_line, "ready VllmWorker-0")
        await asyncio.to_thread(other.wait_line, "ready VllmWorker-0")
        async with dispatching(etcd_url, namespace) as dispatcher:
            roster = dispatcher.roster
            members = await members_when(roster, lambda members: len(members) == 2, 10)
            versions = {member.version: member.lease_id for member in members}
            assert set(versions) == {"0.1.9", __version__}
            listing = await asyncio.to_thread(run, "ps", *servers[2:])
            assert "0.1.9" in listing.stdout and __version__ in listing.stdout
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                loads = [tasks.create_task(dispatcher.load()) for _ in range(8)]
                gave = dispatcher.gave
                await eventually(lambda: min(gave[one] for one in versions.values()) >= 100, 60)
                other.signal(signal.SIGTERM)
                assert await asyncio.to_thread(other.end) == 0
                await members_when(roster, lambda members: len(members) == 1, 10)
                answers = dispatcher.answers
                await eventually(lambda: dispatcher.answers >= answers + 8, 60)
                for load in loads:
                    load.cancel()
            assert not dispatcher.client.stats.moved


async def test_releases_that_do_not_fit_refuse_each_other_and_name_both_versions(
    newer: Installation, servers: tuple[str, ...], etcd_url: str, namespace: str, tmp_path: Path
) -> None:
    theirs = f"9.0.0 (wire version {WIRE_VERSION + 1})"
    ours = f"{__version__} (wire version {WIRE_VERSION})"
    lone = ("--service-name", "VllmWorker")
    with start(newer, servers) as other:
        await asyncio.to_thread(other.wait_line, "ready VllmWorker-0")
        refused = await asyncio.to_thread(
            run, "serve", WORKER, "--state-dir", str(tmp_path / "own"), *servers, *lone
        )
        assert refused.returncode == 1
        [line] = refused.stderr.splitlines()
        assert line.startswith(f"error: cannot join namespace {namespace}: VllmWorker ")
        assert line.index(f"runs dynamo-lite {theirs}") < line.index(f"this is {ours}")
        # Where both run nevertheless, neither is a member to the other.
        async with dispatching(etcd_url, namespace) as dispatcher:
            assert dispatcher.roster.members == ()
        other.signal(signal.SIGTERM)
        assert await asyncio.to_thread(other.end) == 0
    with serving(tmp_path / "own", *servers, *lone, graph=WORKER) as current:
        await asyncio.to_thread(current.wait_line, "ready VllmWorker-0")
        folder = tmp_path / "newer-cwd"
        asked = ("serve", INSTALLED_WORKER, "--state-dir", str(folder / "again"), *servers, *lone)
        refused = await asyncio.to_thread(newer.run, folder, *asked)
        assert refused.returncode == 1
        assert f"runs dynamo-lite {ours}, and this is {theirs}" in refused.stderr

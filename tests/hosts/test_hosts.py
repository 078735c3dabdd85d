"""A graph on several hosts whose clocks differ: hosts of each kind vanish under load."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import eventually
from tests.hosts.load import told_questions
from tests.hosts.network import unavailable
from tests.hosts.rig import NULL, Rig
from tests.hosts.scenarios import SCENARIOS, play
from tests.lacking import lacking
from tests.process.command import ROOT

_RUN = """
from tests.hosts.network import hosts
with hosts(2):
    print("made", flush=True)
    input()
"""

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("no_leaked_tasks")]


@pytest.mark.timeout(600)
async def test_a_worker_host_and_a_frontend_host_vanish(tmp_path: Path) -> None:
    """The other scenarios are run by `scripts/hosts_check`."""
    if why := unavailable():
        lacking(why)
    known = told_questions()
    async with Rig(tmp_path, NULL) as rig:
        for name in ("worker-host-vanishes", "frontend-host-vanishes"):
            assert await play(rig, SCENARIOS[name], known, print) == []


@pytest.mark.parametrize("killed", [True, False])
async def test_a_run_that_ends_or_is_killed_leaves_nothing(killed: bool) -> None:
    if why := unavailable():
        lacking(why)
    command = [sys.executable, "-c", _RUN]
    with subprocess.Popen(command, stdin=-1, stdout=-1, cwd=ROOT) as run:
        assert run.stdin is not None and run.stdout is not None
        assert run.stdout.readline() == b"made\n"

        def left() -> list[str]:
            folders = Path("/run/netns"), Path("/sys/class/net")
            names = [one.name for folder in folders for one in folder.iterdir()]
            return [name for name in names if name.startswith(f"dl{run.pid}a")]

        assert len(left()) == 5  # a bridge, and each host with its end of the cable
        if killed:
            run.kill()
        else:
            run.stdin.close()
        await eventually(lambda: not left(), 30.0)

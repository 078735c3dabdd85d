"""A graph on several hosts whose clocks differ: hosts of each kind vanish under load."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import eventually
from tests.hosts.load import told_questions
from tests.hosts.network import unavailable
from tests.hosts.rig import Rig
from tests.hosts.scenarios import SCENARIOS, play
from tests.lacking import lacking
from tests.started import ROOT

_RUN = "from tests.hosts.network import hosts\nwith hosts(2): print('made', flush=True), input()"

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("no_leaked_tasks")]


@pytest.mark.timeout(600)
async def test_a_worker_host_and_a_frontend_host_vanish(tmp_path: Path) -> None:
    """The other scenarios are run by `scripts/hosts_check`."""
    if why := unavailable():
        lacking(why)
    known = told_questions()
    async with Rig(tmp_path) as rig:
        for name in ("worker-host-vanishes", "frontend-host-vanishes"):
            assert await play(rig, SCENARIOS[name], known, print) == []


async def test_a_run_that_is_killed_leaves_nothing() -> None:
    if why := unavailable():
        lacking(why)
    with subprocess.Popen([sys.executable, "-c", _RUN], stdin=-1, stdout=-1, cwd=ROOT) as run:

        def left() -> list[Path]:
            folders = Path("/run/netns"), Path("/sys/class/net")
            return [path for folder in folders for path in folder.glob(f"dl{run.pid}a*")]

        assert run.stdout and run.stdout.readline() == b"made\n"
        assert len(left()) == 5  # a bridge, and each host with its end of the cable
        run.kill()
        await eventually(lambda: not left(), 30.0)

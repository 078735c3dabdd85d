"""A graph on several hosts whose clocks differ: hosts of each kind vanish under load."""

from pathlib import Path

import pytest

from tests.hosts.load import told_questions
from tests.hosts.network import unavailable
from tests.hosts.rig import NULL, Rig
from tests.hosts.scenarios import SCENARIOS, play
from tests.lacking import lacking

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

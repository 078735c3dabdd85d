"""A graph on several hosts: each vanishes once, or cannot reach some of the others."""

from pathlib import Path

import pytest

from tests.hosts.network import unavailable
from tests.hosts.rig import NULL, Rig
from tests.hosts.scenarios import play, worker_hears_no_server, worker_host_vanishes

_WHY_NOT = unavailable()

pytestmark = [
    pytest.mark.usefixtures("no_leaked_tasks"),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "hosts can be made"),
]


@pytest.mark.timeout(400)
async def test_a_host_vanishes_and_one_hears_nothing(tmp_path: Path) -> None:
    """The others are run by `scripts/hosts_check`."""
    async with Rig(tmp_path, NULL) as rig:
        for scenario in (worker_host_vanishes, worker_hears_no_server):
            assert await play(rig, scenario, print) == []

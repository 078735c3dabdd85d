"""Workers follow a step of load up and down while the planner is killed in each phase."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy


@pytest.mark.timeout(900)
def test_no_request_is_lost_and_no_role_falls_below_its_minimum(tmp_path: Path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.chaos.planner", "--null", "--seconds=20"),
            *("--directory", str(tmp_path / "run")),
        ],
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("no violation\n")
    for kind in ("add", "remove"):
        assert re.search(rf"^ +\d+  {kind} ", done.stdout, re.MULTILINE), done.stdout

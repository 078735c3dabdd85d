"""Lines of progress that no process can read any more."""

import os
import subprocess
import sys

_SCRIPT = """
import sys
from dynamo_lite.serve.progress import Progress, say

sys.stdin.readline()
for _ in range(2):
    Progress().line("serve", "stopping")
    say("ready", sys.stdout)
"""


def test_a_reader_that_is_gone_changes_nothing():
    """Neither is an error raised, nor is the exit code another one."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT], stdin=subprocess.PIPE, stdout=writing, stderr=writing
    )
    os.close(writing)
    os.close(reading)
    process.communicate(b"go\n")
    assert process.returncode == 0

"""Python code in interpreters of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator


def printed(code: str) -> Iterator[str]:
    """What `code` prints in each of two interpreters, whose sets have different orders."""
    for hash_seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        yield answer.stdout.strip()

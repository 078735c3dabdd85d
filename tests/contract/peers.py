"""A module of the tests in a process of its own, which is spoken to in lines of JSON."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

_ROOT = Path(__file__).parents[2]


class PeerProcess:
    """As a context manager it is killed in the end.

    said: what it says, line by line. What is no JSON is skipped: NIXL prints on the same stream.
    before: a command that runs it. env: besides this process's.
    """

    def __init__(self, module: str, *arguments: str, before: Sequence[str] = (), **env: str):
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **env},
            text=True,
        )
        self.said: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._reader = threading.Thread(target=self._listen, name=f"reads {module}")
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def tell(self, what: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        with self.process:
            self.process.kill()
            self._reader.join()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.put(json.loads(line))

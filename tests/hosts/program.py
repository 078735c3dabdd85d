"""A command on a host, which may be killed and started again."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.builders import eventually
from tests.hosts.network import Host
from tests.started import ROOT

_READY_S = 400.0
_ENDED_S = 60.0


@dataclass(eq=False)
class Program:
    """log: grows over restarts."""

    host: Host
    name: str
    command: Sequence[str]
    log: Path
    url: str = ""
    #: What its output has when it is ready; empty: nothing.
    ready_line: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    _process: "subprocess.Popen[bytes] | None" = None
    _seen: int = 0

    @property
    def answers(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self._seen = self.log.stat().st_size if self.log.exists() else 0
        self._process = self.host.start(self.command, self.log, env=dict(self.env), cwd=ROOT)

    async def ready(self) -> None:
        """Raises AssertionError when it has ended instead."""

        def said() -> bool:
            text = self.log.read_bytes()[self._seen :].decode(errors="replace")
            assert self.answers, f"{self.name} has ended: {text[-2000:]}"
            return re.search(self.ready_line, text, re.MULTILINE) is not None

        await eventually(said, _READY_S)

    async def end(self) -> int:
        """Ends it, with all its processes if they do not end by themselves. The exit code."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # `unshare` does not pass signals on
        await eventually(lambda: process.poll() is not None, _ENDED_S)
        return process.returncode

    async def restart(self) -> None:
        """Ends it in order and starts it again. Returns when it is ready."""
        assert await self.end() == 0, f"{self.name} has not ended in order"
        self.start()
        await self.ready()

    @property
    def restarts(self) -> int:
        """How often its supervisor has started its process again."""
        return self.log.read_text(errors="replace").count("restarting in")

    def reap(self) -> None:
        """Waits for its end, after its host was killed."""
        if self._process is not None:
            self._process.wait(timeout=_ENDED_S)

"""One child process and its process group, from spawn to end.

Leaving the context always ends the child: SIGTERM, a short wait, then SIGKILL to every
process that is left in its process group.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve import child
from dynamo_lite.serve.processes import end_group, signal_group, start_group, terminate

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 3.0
_LAST_REPORTS_S = 0.5
_REPORT_LIMIT_BYTES = 1 << 20
_STDERR = 2


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is needed to start one instance of a service, any number of times."""

    service: str
    instance: int
    #: File with its ChildPlan.
    plan_path: Path
    #: File with its output; None: the supervisor's stderr.
    log_path: Path | None
    #: Its whole environment.
    env: Mapping[str, str]
    #: The devices of the host that it occupies.
    devices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.service}-{self.instance}"


class ChildProcess:
    """Async context manager; entering it spawns, and raises StartupError if it cannot."""

    def __init__(self, launch: Launch):
        self._launch = launch
        self._process: asyncio.subprocess.Process | None = None
        self._reports = asyncio.StreamReader(limit=_REPORT_LIMIT_BYTES)

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group; 0 before the spawn."""
        return self._process.pid if self._process else 0

    async def __aenter__(self) -> Self:
        path, reports = self._launch.log_path, asyncio.StreamReaderProtocol(self._reports)
        try:
            with contextlib.ExitStack() as files:
                read_end, write_end = os.pipe()
                files.callback(os.close, write_end)
                pipe = os.fdopen(read_end, "rb", buffering=0)
                await asyncio.get_running_loop().connect_read_pipe(lambda: reports, pipe)
                log = _STDERR if path is None else files.enter_context(path.open("ab"))
                self._process = await start_group(
                    child.command(self._launch.plan_path, write_end),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._launch.env,
                    pass_fds=(write_end,),
                )
        except OSError as exc:
            why = f"{self._launch.name}: cannot start its process: {exc}"
            raise StartupError(why) from exc
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            await end_group(self._process, _END_TIMEOUT_S)

    async def run(self, on_report: Callable[[dict[str, Any]], None]) -> int:
        """Passes each report to `on_report` until the process has ended. Returns its exit code."""
        if self._process is None:
            raise RuntimeError("the process was not spawned; enter the context first")
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read_reports(on_report))
            code = await self._process.wait()
            # A grandchild may hold the pipe open: wait for the last lines, not for its end.
            await asyncio.wait([reader], timeout=_LAST_REPORTS_S)
            reader.cancel()
        return code

    def terminate(self) -> None:
        """SIGTERM to the child alone: it ends its own engine processes in order."""
        if self._process is not None:
            terminate(self._process)

    def kill(self) -> None:
        """SIGKILL to the process group. Does not wait until it is empty."""
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)

    async def _read_reports(self, on_report: Callable[[dict[str, Any]], None]) -> None:
        while True:
            try:
                line = await self._reports.readline()
                if not line:
                    return
                report = msgspec.json.decode(line, type=dict[str, Any])
            except ValueError as exc:  # also a line over the limit, which the reader has dropped
                logger.warning("%s: malformed report on its pipe: %s", self._launch.name, exc)
                continue
            on_report(report)

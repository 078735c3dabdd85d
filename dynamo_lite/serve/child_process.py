"""One child process from spawn to the last member of its process group.

Leaving the context ends the child on every path: SIGTERM, a short wait, then
SIGKILL to whatever its process group still holds.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.processes import death_signal_hook, signal_group

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 3.0
_SWEEP_TIMEOUT_S = 2.0
_LAST_REPORTS_S = 0.5
_REPORT_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All that is needed to start one instance of a service, any number of times.

    plan_path: the file with its ChildPlan. env: its whole environment.
    """

    service: str
    instance: int
    plan_path: Path
    log_path: Path
    env: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.service}-{self.instance}"


class ChildProcess:
    """Async context manager; entering it spawns, and raises StartupError if it cannot."""

    def __init__(self, launch: Launch):
        self._launch = launch
        self._process: asyncio.subprocess.Process | None = None
        self._reports: asyncio.StreamReader | None = None

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group; 0 before the spawn."""
        return self._process.pid if self._process else 0

    async def __aenter__(self) -> Self:
        read_end, write_end = os.pipe()
        try:
            self._reports = await _reader(read_end)
            with self._launch.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "dynamo_lite.serve.child"),
                    *("--spec", str(self._launch.plan_path), "--report-fd", str(write_end)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(self._launch.env),
                    pass_fds=(write_end,),
                    start_new_session=True,
                    preexec_fn=death_signal_hook(),
                )
        except OSError as exc:
            raise StartupError(f"{self._launch.name} could not be started: {exc}") from exc
        finally:
            os.close(write_end)
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        self.terminate()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            logger.warning("%s did not end in %g s", self._launch.name, _END_TIMEOUT_S)
        finally:
            await self._sweep(process)

    async def run(self, on_report: Callable[[dict[str, Any]], None]) -> int:
        """Hands every report over until the process has ended. Returns its exit code."""
        if self._process is None:
            raise RuntimeError("not spawned")
        async with asyncio.TaskGroup() as tasks:
            pump = tasks.create_task(self._pump(on_report))
            code = await self._process.wait()
            # A grandchild may hold the pipe open: wait for the last lines, not for its end.
            await asyncio.wait([pump], timeout=_LAST_REPORTS_S)
            pump.cancel()
        return code

    def terminate(self) -> None:
        """SIGTERM to the child alone: it ends its own engine processes in order."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        if self._process is not None and self._process.returncode is None:
            signal_group(self._process.pid, signal.SIGKILL)

    async def _pump(self, on_report: Callable[[dict[str, Any]], None]) -> None:
        if self._reports is None:
            return
        while True:
            try:
                line = await self._reports.readline()
            except ValueError:
                continue  # a line over the limit: dropped by the reader
            if not line:
                return
            try:
                report = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError:
                logger.warning("%s sent a malformed report: %r", self._launch.name, line[:200])
                continue
            on_report(report)

    async def _sweep(self, process: asyncio.subprocess.Process) -> None:
        """Kills what is left of the group and waits until it is empty."""
        left = signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        deadline = asyncio.get_running_loop().time() + _SWEEP_TIMEOUT_S
        while left and asyncio.get_running_loop().time() < deadline:
            # Nobody is told when a process group becomes empty: asking is the only way.
            await asyncio.sleep(0.01)
            left = signal_group(process.pid, 0)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_REPORT_LIMIT_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader

"""One child process and its process group, from spawn to end.

Leaving the context always ends the child: SIGTERM, a short wait, then SIGKILL to every
process that is left in its process group.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.process.death_signal import death_signal_hook
from dynamo_lite.serve import child
from dynamo_lite.serve.forking import ForkedProcess, fork
from dynamo_lite.serve.processes import signal_group

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 3.0
_SWEEP_TIMEOUT_S = 2.0
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
    #: Whether the fork server makes it.
    forks: bool = False
    #: Keys of vLLM's in its section.
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.service}-{self.instance}"


class ChildProcess:
    """Async context manager; entering it spawns, and raises StartupError if it cannot."""

    def __init__(self, launch: Launch):
        self._launch = launch
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._reports: asyncio.StreamReader | None = None

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group; 0 before the spawn."""
        return self._process.pid if self._process else 0

    async def __aenter__(self) -> Self:
        try:
            read_end, write_end = os.pipe()
        except OSError as exc:
            raise self._cannot_start(exc) from exc
        try:
            self._reports = await _reader(read_end)
            with _output(self._launch.log_path) as log:
                self._process = await self._spawn(write_end, log)
        except OSError as exc:
            raise self._cannot_start(exc) from exc
        finally:
            os.close(write_end)
        return self

    async def _spawn(self, report: int, log: int) -> asyncio.subprocess.Process | ForkedProcess:
        """Raises OSError."""
        plan, env = self._launch.plan_path, self._launch.env
        if self._launch.forks:
            return await fork(plan, env, report_fd=report, output_fd=log)
        return await asyncio.create_subprocess_exec(
            *child.command(plan, report),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(env),
            pass_fds=(report,),
            start_new_session=True,
            preexec_fn=death_signal_hook(),
        )

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        self.terminate()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            logger.warning(
                "%s: no exit within %g s after SIGTERM; killing it",
                self._launch.name,
                _END_TIMEOUT_S,
            )
        finally:
            await self._sweep(process)

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
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        if self._process is not None and self._process.returncode is None:
            signal_group(self._process.pid, signal.SIGKILL)

    def kill_rest(self) -> None:
        """SIGKILL to what is left of the process group. Does not wait until it is empty."""
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)

    def _cannot_start(self, why: OSError) -> StartupError:
        return StartupError(f"{self._launch.name}: cannot start its process: {why}")

    async def _read_reports(self, on_report: Callable[[dict[str, Any]], None]) -> None:
        if self._reports is None:
            return
        while True:
            try:
                line = await self._reports.readline()
            except ValueError:
                continue  # the reader has dropped a line over the limit
            if not line:
                return
            try:
                report = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError:
                logger.warning(
                    "%s: malformed report on its pipe: %r", self._launch.name, line[:200]
                )
                continue
            on_report(report)

    async def _sweep(self, process: asyncio.subprocess.Process | ForkedProcess) -> None:
        """Kills the rest of the process group and waits until it is empty."""
        left = signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        deadline = asyncio.get_running_loop().time() + _SWEEP_TIMEOUT_S
        while left and asyncio.get_running_loop().time() < deadline:
            # Nothing reports when a process group becomes empty, so this polls.
            await asyncio.sleep(0.01)
            left = signal_group(process.pid, 0)


@contextlib.contextmanager
def _output(log_path: Path | None) -> Iterator[int]:
    """A file descriptor for a child's output."""
    if log_path is None:
        yield _STDERR
        return
    with log_path.open("ab") as log:
        yield log.fileno()


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_REPORT_LIMIT_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader

"""Keeps one instance of a service running: restarts it after a crash, not after exit 0."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.child_process import ChildProcess, Launch
from dynamo_lite.serve.lease_revoker import LeaseRevoker
from dynamo_lite.serve.progress import Progress, exit_text
from dynamo_lite.serve.run_state import ProcessState

_LOG_TAIL_LINES = 12


class InstanceSupervisor:
    """Spawns one instance, watches it, and spawns it again after a crash.

    Args:
        backoff: delay before each restart.
        leases: revokes the lease of a process that died.
        on_change: called after each change of `state`.
    """

    def __init__(
        self,
        launch: Launch,
        backoff: Backoff,
        leases: LeaseRevoker,
        progress: Progress,
        on_change: Callable[[], None],
    ):
        self.launch = launch
        #: Its entry in run.json.
        self.state = ProcessState(
            service=launch.service, instance=launch.instance, log=str(launch.log_path)
        )
        #: The component's last "ready" report, e.g. {"url": ...}.
        self.facts: dict[str, Any] = {}
        #: Set when it is ready for the first time.
        self.ready = asyncio.Event()
        #: Set during a stop, when no other process depends on it.
        self.drained = asyncio.Event()
        #: Set when it has ended and will not be restarted.
        self.done = asyncio.Event()
        self._backoff = backoff
        self._leases = leases
        self._progress = progress
        self._on_change = on_change
        self._stopping = asyncio.Event()
        self._forced = False
        self._child: ChildProcess | None = None
        self._error = ""

    def __repr__(self) -> str:
        return f"InstanceSupervisor({self.launch.name}, {self.state.state}, pid={self.state.pid})"

    async def keep(self) -> None:
        """Runs until the instance exits with 0 or `stop` was called and it has ended.

        Raises StartupError when it ends before it was ready for the first time.
        """
        failures = 0
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                code = await self._run_once()
                if code != 0 and self.state.lease:
                    # A process that was killed has not revoked it itself.
                    await self._leases.revoke(int(self.state.lease, 16))
                if self._stopping.is_set():
                    return
                if not self.ready.is_set():
                    raise StartupError(self._start_failure(code))
                if code == 0:
                    self._change("stopped")
                    self._progress.line(self.launch.name, "left the graph (exit 0)")
                    return
                restart = self._backoff.after_exit(failures, time.monotonic() - began)
                failures = restart.failures
                await self._pause(code, restart.delay_s)
        finally:
            self._change("stopped")
            self.drained.set()
            self.done.set()

    def stop(self) -> None:
        """Drains it (SIGTERM) without a restart. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """Sends SIGKILL to its process group; no restart."""
        self._forced = True
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _run_once(self) -> int:
        self._error = ""
        async with ChildProcess(self.launch) as child:
            self._child = child
            self.state.pid = child.pid
            self._change("starting")
            try:
                # `stop` or `kill` during the spawn had no child to signal.
                if self._forced:
                    child.kill()
                elif self._stopping.is_set():
                    child.terminate()
                return await child.run(self._on_report)
            finally:
                self._child = None

    async def _pause(self, code: int, delay_s: float) -> None:
        self.state.restarts += 1
        self.state.pid, self.state.lease, self.state.status_url = 0, "", ""
        self._change("backoff")
        why = f": {self._error}" if self._error else ""
        self._progress.line(
            self.launch.name, f"ended ({exit_text(code)}){why}; restarting in {delay_s:g} s"
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()

    def _on_report(self, report: dict[str, Any]) -> None:
        match report.get("state"):
            case "starting":
                self._progress.line(self.launch.name, str(report.get("detail", "")))
            case "ready":
                self.state.lease = str(report.get("lease", ""))
                self.state.status_url = str(report.get("status_url", ""))
                self.facts = report
                self._change("ready")
                self._progress.line(self.launch.name, "ready")
                self.ready.set()
            case "draining":
                self._change("draining")
                self._progress.line(self.launch.name, f"draining: {report.get('reason', '')}")
            case "drained" if self._stopping.is_set():
                self.drained.set()
            case "failed":
                self._error = str(report.get("error", ""))

    def _change(self, state: str) -> None:
        if self.state.state != state:
            self.state.state = state
            self._on_change()

    def _start_failure(self, code: int) -> str:
        why = self._error or f"ended before it was ready ({exit_text(code)})"
        return f"{self.launch.name}: {why}\n{self._log_tail()}"

    def _log_tail(self) -> str:
        try:
            with self.launch.log_path.open(encoding="utf-8", errors="replace") as log:
                lines = deque(log, maxlen=_LOG_TAIL_LINES)
        except OSError:
            lines = []
        return f"last lines of {self.launch.log_path}:\n" + "".join(f"  {line}" for line in lines)

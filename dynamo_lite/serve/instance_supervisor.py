"""Keeps one instance of a service running: restarts it after a crash, not after it has left."""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from typing import Any, Literal

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.serve.child_process import ChildProcess, Launch
from dynamo_lite.serve.lease_revoker import LeaseRevoker
from dynamo_lite.serve.progress import Progress, exit_text
from dynamo_lite.serve.run_state import ProcessState

_LOG_TAIL_LINES = 12
#: What follows the message of a pydantic error.
_INPUT = re.compile(r" \[type=\w+, input_value=.*?, input_type=\w+\]( For further \S+ visit \S+)?")
#: The last line of a traceback, in the log of an engine's process.
_RAISED = re.compile(r"^(?:\([^)]*\) )*([\w.]*(?:Error|Exception): .*)$", re.MULTILINE)


class InstanceSupervisor:
    """Spawns one instance, watches it, and spawns it again after a crash.

    Args:
        backoff: delay before each restart.
        leases: revokes the lease of a process that died.
        on_change: called after each change of `state`.
        needed: whether the graph ends, or goes on without it, when it cannot be started for the
            first time.
    """

    def __init__(
        self,
        launch: Launch,
        backoff: Backoff,
        leases: LeaseRevoker,
        progress: Progress,
        on_change: Callable[[], None],
        *,
        needed: bool = True,
    ):
        self.launch = launch
        #: Its entry in run.json.
        self.state = ProcessState(
            service=launch.service, instance=launch.instance, log=str(launch.log_path or "")
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
        self._needed = needed
        self._stopping = asyncio.Event()
        self._forced = False
        # It drains by itself and will not be restarted: its lease was revoked, or it got a signal.
        self._leaves = False
        self._child: ChildProcess | None = None
        self._error = ""

    @property
    def phase(self) -> Literal["starting", "ready", "draining", "ended"]:
        """The phase that `RoleCounts` counts. A process that is restarted after a crash is
        "ready"."""
        if self.done.is_set():
            return "ended"
        if self._stopping.is_set() or self._leaves:
            return "draining"
        return "ready" if self.ready.is_set() else "starting"

    @property
    def lease_id(self) -> int:
        """Lease of the process, or of the last process if it has ended; 0 while it is not
        known."""
        return int(self.state.lease or "0", 16)

    async def keep(self) -> None:
        """Runs until the instance exits with 0 or `stop` was called and it has ended.

        If it cannot be spawned or ends before it was ready for the first time: raises StartupError
        if it is needed; else its state becomes "failed". Later it is spawned again in any case.
        """
        failures = 0
        failed = False
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                self._error = ""
                try:
                    code = await self._run_child()
                except StartupError as exc:
                    if not self.ready.is_set():
                        raise
                    # A file, memory or a process id may be missing for a while only.
                    self._error, code = str(exc), None
                if self._stopping.is_set():
                    return
                if not self.ready.is_set():
                    raise StartupError(self._start_failure(code or 0))
                if code is not None and (code == 0 or self._leaves):
                    self._change("stopped")
                    self._progress.line(self.launch.name, f"left the graph ({exit_text(code)})")
                    return
                self._leaves = False
                restart = self._backoff.after_exit(failures, time.monotonic() - began)
                failures = restart.failures
                await self._pause(code, restart.delay_s)
        except StartupError as exc:
            if self._needed:
                raise
            failed = True
            self.state.error = str(exc)
            self._progress.line(
                self.launch.name, f"cannot be started; the graph continues without it: {exc}"
            )
        finally:
            self.drained.set()
            self.done.set()
            self._change("failed" if failed else "stopped")

    def stop(self) -> None:
        """Drains it (SIGTERM) without a restart. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._child is not None:
            self._change("draining")
            self._child.terminate()

    def kill(self) -> None:
        """Sends SIGKILL to its process group; no restart."""
        self._forced = True
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _run_child(self) -> int:
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
                code = await child.run(self._on_report)
                lease = self.state.lease
                if code != 0 and self.state.state == "ready":
                    self.state.pid, self.state.lease, self.state.status_url = 0, "", ""
                    self._change("backoff")
                if code != 0 and lease:
                    # A killed process has not revoked its lease itself. Others hear of its death
                    # now: until the memory of its killed engine is free, seconds may pass.
                    child.kill()
                    await self._leases.revoke(int(lease, 16))
                return code
            finally:
                self._child = None
                self.state.pid, self.state.status_url = 0, ""

    async def _pause(self, code: int | None, delay_s: float) -> None:
        what = "not started" if code is None else f"ended ({exit_text(code)})"
        self.state.restarts += 1
        self.state.lease, self.state.state = "", "backoff"
        self._on_change()
        why = f": {self._error}" if self._error else ""
        self._progress.line(self.launch.name, f"{what}{why}; restarting in {delay_s:g} s")
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
                self._leaves = report.get("for_good") is True
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
        """Prints the end of its log. Returns a line with the cause."""
        path, log = self.launch.log_path, ""
        tail = "its log is above"
        if path is not None:
            with contextlib.suppress(OSError):
                log = path.read_text(encoding="utf-8", errors="replace")
            lines = log.splitlines()[-_LOG_TAIL_LINES:]
            tail = "\n".join([f"last lines of {path}:", *(f"  {line}" for line in lines)])
        self._progress.line(self.launch.name, f"not started; {tail}")
        cause = _INPUT.sub("", " ".join(self._error.split()))
        # vLLM says so where another of its processes has failed.
        if "root cause above" in cause and (raised := _RAISED.search(log)):
            cause = raised[1]
        cause = cause or f"ended before it was ready ({exit_text(code)})"
        return f"{self.launch.name}: {cause.rstrip('.')}"

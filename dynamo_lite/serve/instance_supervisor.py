"""Keeps one instance of a service running: restarts it after a crash, not after it has left."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.child_process import ChildProcess, Launch
from dynamo_lite.serve.lease_revoker import LeaseRevoker
from dynamo_lite.serve.progress import Progress, exit_text
from dynamo_lite.serve.run_state import ProcessState

_LOG_TAIL_LINES = 12
#: In place of an exit code, which is smaller.
_NOT_SPAWNED = 1 << 16

#: What happens when it cannot be started for the first time: the graph ends ("needed"), the graph
#: goes on without it ("once"), or it is tried again.
FirstStart = Literal["needed", "once", "again"]


class InstanceSupervisor:
    """Spawns one instance, watches it, and spawns it again after a crash.

    Args:
        backoff: delay before each restart.
        leases: revokes the lease of a process that died.
        on_change: called after each change of `state`.
        first_start: what happens when it cannot be started.
    """

    def __init__(
        self,
        launch: Launch,
        backoff: Backoff,
        leases: LeaseRevoker,
        progress: Progress,
        on_change: Callable[[], None],
        *,
        first_start: FirstStart = "needed",
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
        self._first_start: FirstStart = first_start
        self._stopping = asyncio.Event()
        self._forced = False
        # It drains by itself and will not be restarted: its lease was revoked, or it got a signal.
        self._leaves = False
        self._child: ChildProcess | None = None
        self._error = ""
        #: The launch that its present process was spawned with.
        self.spawned: Launch = launch
        #: Why an engine was not kept: what its process said, or what became of it here.
        self.not_kept = ""
        #: Of its first process that was ready: whether it had changed its role, and the engine's
        #: seconds for that.
        self.began_kept, self.change_s = False, 0.0
        # What gets the process when it changes its role, and what it was given itself.
        self._successor: InstanceSupervisor | None = None
        self._taken: ChildProcess | None = None

    def __repr__(self) -> str:
        return f"InstanceSupervisor({self.launch.name}, {self.state.state}, pid={self.state.pid})"

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

    @property
    def took_over(self) -> bool:
        """Whether its process is one that has changed its role."""
        return self.spawned is not self.launch

    async def keep(self) -> None:
        """Runs until the instance exits with 0 or `stop` was called and it has ended.

        If it cannot be spawned or ends before it was ready for the first time: raises StartupError
        if its first start is "needed"; its state becomes "failed" if the first start is tried
        "once". Later it is spawned again in any case.
        """
        failures = 0
        failed = False
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                code = await self._run_once()
                if self._stopping.is_set():
                    return
                leaves = code == 0 or self._leaves
                if not self.ready.is_set() and (leaves or self._first_start != "again"):
                    raise StartupError(self._start_failure(code))
                if leaves:
                    self._change("stopped")
                    self._progress.line(self.launch.name, f"left the graph ({exit_text(code)})")
                    return
                restart = self._backoff.after_exit(failures, time.monotonic() - began)
                failures = restart.failures
                await self._pause(code, restart.delay_s)
        except StartupError as exc:
            if self._first_start == "needed":
                raise
            failed = True
            self.state.error = str(exc).partition("\n")[0]
            self._progress.line(
                self.launch.name, f"cannot be started; the graph continues without it\n{exc}"
            )
        finally:
            try:
                # Stopped before its first process: nothing else would end the one that it got.
                await self.end_taken()
            finally:
                self.drained.set()
                self.done.set()
                if not failed:
                    self.state.error = ""
                self._change("failed" if failed else "stopped")

    def stop(self) -> None:
        """Drains it (SIGTERM) without a restart. Idempotent."""
        # A process that drains for a change of its role must hear that there will be none.
        changes, self._successor = self._successor is not None, None
        if self._stopping.is_set() and not changes:
            return
        self._stopping.set()
        if self._child is not None:
            self._change("draining")
            self._child.terminate()

    def change_role(self, successor: "InstanceSupervisor") -> None:
        """As `stop`, but its process goes on as that of the successor, if it can. Whether it has
        done so is to be seen when this one is done: by the successor's `took_over`."""
        if self._stopping.is_set():
            return
        self.not_kept = ""  # what it was belongs to the switch that began this worker
        child = self._child
        if child is None or not child.order(successor.launch.plan_path):
            self.not_kept = "its process takes no orders"
            self.stop()
            return
        self._successor = successor
        self._stopping.set()
        self._change("draining")

    def kill(self) -> None:
        """Sends SIGKILL to its process group; no restart."""
        self._forced = True
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    def take_over(self, child: ChildProcess, spawned: Launch) -> None:
        """`keep` begins with this process. spawned: what it was started with."""
        self._taken, self.spawned = child.hand_over(self.launch), spawned
        self.state.log = str(spawned.log_path or "")

    async def end_taken(self) -> None:
        """Ends the process that it took over, if `keep` will never be called."""
        if self._taken is not None:
            async with self._taken:
                self._taken = None

    async def _run_once(self) -> int:
        """Returns the exit code; `_NOT_SPAWNED` before another try. Raises StartupError."""
        self._error = ""
        try:
            return await self._run_child()
        except StartupError as exc:
            if not self.ready.is_set() and self._first_start != "again":
                raise
            # A file, memory or a process id may be missing for a while only.
            self._error = str(exc)
            return _NOT_SPAWNED

    async def _run_child(self) -> int:
        taken, self._taken = self._taken, None
        if taken is None:
            self.spawned, self.state.log = self.launch, str(self.launch.log_path or "")
        async with taken or ChildProcess(self.launch) as child:
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
                changes = self._successor is not None and not self._successor.took_over
                changed = self.took_over and not self.ready.is_set()
                if changes or changed:
                    self.not_kept = self.not_kept or f"its process ended ({exit_text(code)})"
                if code != 0 and self.state.lease:
                    # A killed process has not revoked its lease itself. Others hear of its death
                    # now: until the memory of its killed engine is free, seconds may pass.
                    child.kill_rest()
                    await self._leases.revoke(int(self.state.lease, 16))
                return code
            finally:
                self._child = None

    async def _pause(self, code: int, delay_s: float) -> None:
        what = "not started" if code == _NOT_SPAWNED else f"ended ({exit_text(code)})"
        self.state.restarts += 1
        self.state.pid, self.state.lease, self.state.status_url = 0, "", ""
        if not self.ready.is_set():
            self.state.error = self._error or exit_text(code)
        self._change("backoff")
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
                self.state.error = ""
                self.facts = report
                if not self.ready.is_set():
                    self.began_kept = self.took_over
                    self.change_s = float(report.get("change_s", 0.0))
                self._change("ready")
                self._progress.line(self.launch.name, "ready")
                self.ready.set()
            case "draining":
                self._leaves = report.get("for_good") is True
                self.not_kept = str(report.get("keeps_not", "")) or self.not_kept
                self._change("draining")
                self._progress.line(self.launch.name, f"draining: {report.get('reason', '')}")
            case "drained" if self._stopping.is_set():
                self.drained.set()
            case "switching" if self._child is not None and self._successor is not None:
                self._successor.take_over(self._child, self.spawned)
            case "failed":
                self._error = str(report.get("error", ""))
                if self.took_over and not self.ready.is_set():
                    self.not_kept = self._error

    def _change(self, state: str) -> None:
        if self.state.state != state:
            self.state.state = state
            self._on_change()

    def _start_failure(self, code: int) -> str:
        why = self._error or f"ended before it was ready ({exit_text(code)})"
        path = self.launch.log_path
        tail = "its log is above" if path is None else _log_tail(path)
        return f"{self.launch.name}: {why}\n{tail}"


def _log_tail(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as log:
            lines = deque(log, maxlen=_LOG_TAIL_LINES)
    except OSError:
        lines = []
    return f"last lines of {path}:\n" + "".join(f"  {line}" for line in lines)

"""Keeps one process of a graph running: restarts it after a crash, not after it has left."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.serve.embedded import etcdctl
from dynamo_lite.serve.launches import Launch
from dynamo_lite.serve.processes import end_group, signal_group, start_group, terminate
from dynamo_lite.serve.progress import Progress, exit_text
from dynamo_lite.serve.run_state import ProcessState

logger = logging.getLogger(__name__)

BACKOFF = Backoff(longest_s=5.0)

_END_TIMEOUT_S = 3.0
_LAST_REPORTS_S = 0.5
_REPORT_LIMIT_BYTES = 1 << 20
_STDERR = 2
_LOG_TAIL_LINES = 12
#: A lease that is not revoked by then expires.
_REVOKE_TIMEOUT_S = 3
#: What follows the message of a pydantic error.
_INPUT = re.compile(r" \[type=\w+, input_value=.*?, input_type=\w+\]( For further \S+ visit \S+)?")
#: The last line of a traceback, in the log of an engine's process.
_RAISED = re.compile(r"^(?:\([^)]*\) )*([\w.]*(?:Error|Exception): .*)$", re.MULTILINE)


class InstanceSupervisor:
    """Spawns one process, watches it, and spawns it again after a crash.

    Args:
        etcd_url: where the lease of a process that died is revoked.
        on_change: called after each change of `state`.
        needed: whether the graph ends, or goes on without it, when it cannot be started for the
            first time.
    """

    def __init__(
        self,
        launch: Launch,
        etcd_url: str,
        progress: Progress,
        on_change: Callable[[], None],
        *,
        needed: bool = True,
        backoff: Backoff = BACKOFF,
    ):
        self.launch = launch
        #: Its entry in run.json.
        self.state = ProcessState(
            service=launch.service, instance=launch.instance, log=str(launch.log_path or "")
        )
        #: The component's last "ready" report, e.g. {"url": ...}.
        self.facts: dict[str, Any] = {}
        #: Whether it has been ready.
        self.was_ready = False
        #: Whether no other process depends on it any more, during a stop.
        self.drained = False
        self._etcd_url = etcd_url
        self._progress, self._on_change = progress, on_change
        self._needed, self._backoff = needed, backoff
        self._stopping = asyncio.Event()
        # It drains by itself and will not be restarted: its lease was revoked, or it got a signal.
        self._leaves = False
        self._process: asyncio.subprocess.Process | None = None
        self._error = ""
        #: What its start waits for.
        self.doing = "starting"

    @property
    def phase(self) -> Literal["starting", "ready", "draining", "ended"]:
        """The phase that `RoleCounts` counts. A process that is restarted after a crash is
        "ready", one that will not be restarted has "ended"."""
        if self.state.state in ("stopped", "failed"):
            return "ended"
        if self._stopping.is_set() or self._leaves:
            return "draining"
        return "ready" if self.was_ready else "starting"

    @property
    def lease_id(self) -> int:
        """Lease of the process, or of the last process if it has ended; 0 while it is not
        known."""
        return int(self.state.lease or "0", 16)

    async def keep(self) -> None:
        """Runs until the process exits with 0 or `stop` was called and it has ended.

        If it cannot be spawned or ends before it was ready for the first time: raises StartupError
        if it is needed; else its state becomes "failed". Later it is spawned again in any case.
        """
        try:
            await self._keep()
        except StartupError as exc:
            if self._needed:
                raise
            self.state.error = str(exc)
            self._line(f"cannot be started; the graph continues without it: {exc}")
        finally:
            self.drained = True
            self._change("failed" if self.state.error else "stopped")

    async def _keep(self) -> None:
        failures, what = 0, ""
        while not self._stopping.is_set():
            began = time.monotonic()
            self._error = ""
            try:
                code = await self._run()
                what = f"ended ({exit_text(code)})" + (f": {self._error}" if self._error else "")
                if self._stopping.is_set() or (self.was_ready and (code == 0 or self._leaves)):
                    self._change("stopped")
                    self._line(f"left the graph ({exit_text(code)})")
                    return
                if not self.was_ready:
                    raise StartupError(self._start_failure(code))
            except StartupError as exc:
                if not self.was_ready:
                    raise
                # A file, memory or a process id may be missing for a while only.
                what = f"not started: {exc}"
            self._leaves = False
            failures, delay_s = self._backoff.after_exit(failures, time.monotonic() - began)
            self.state.restarts += 1
            self.state.lease, self.state.state = "", "backoff"
            self._on_change()
            self._line(f"{what}; restarting in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    def stop(self) -> None:
        """Drains it (SIGTERM to it alone: it ends its own processes), without a restart.
        Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._process is not None:
            self._change("draining")
            terminate(self._process)

    def kill(self) -> None:
        """Sends SIGKILL to its process group; no restart. Does not wait until the group is
        empty."""
        self._stopping.set()
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)

    async def _run(self) -> int:
        """One process, from its spawn until its group is empty. Returns its exit code.

        Raises StartupError when it cannot be spawned.
        """
        reports = asyncio.StreamReader(limit=_REPORT_LIMIT_BYTES)
        process = await self._spawn(reports)
        try:
            self._process, self.state.pid = process, process.pid
            self._change("starting")
            # `stop` or `kill` during the spawn had no process to signal.
            if self._stopping.is_set():
                terminate(process)
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(reports))
                code = await process.wait()
                # A grandchild may hold the pipe open: wait for the last lines, not for its end.
                await asyncio.wait([reader], timeout=_LAST_REPORTS_S)
                reader.cancel()
            lease = self.state.lease
            self.state.pid, self.state.status_url = 0, ""
            if code != 0 and self.state.state == "ready":
                self.state.lease = ""
                self._change("backoff")
            if code != 0 and lease:
                # A killed process has not revoked its lease itself. Others hear of its death
                # now: until the memory of its killed engine is free, seconds may pass.
                signal_group(process.pid, signal.SIGKILL)
                await revoke_lease(self._etcd_url, int(lease, 16))
            return code
        finally:
            self._process = None
            await end_group(process, _END_TIMEOUT_S)

    async def _spawn(self, reports: asyncio.StreamReader) -> asyncio.subprocess.Process:
        path, protocol = self.launch.log_path, asyncio.StreamReaderProtocol(reports)
        try:
            with contextlib.ExitStack() as files:
                read_end, write_end = os.pipe()
                files.callback(os.close, write_end)
                pipe = os.fdopen(read_end, "rb", buffering=0)
                await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
                log = _STDERR if path is None else files.enter_context(path.open("ab"))
                return await start_group(
                    (*self.launch.command, str(write_end)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.launch.env,
                    pass_fds=(write_end,),
                )
        except OSError as exc:
            why = f"{self.launch.name}: cannot start its process: {exc}"
            raise StartupError(why) from exc

    async def _read(self, reports: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await reports.readline()
                if not line:
                    return
                report = msgspec.json.decode(line, type=dict[str, Any])
            except ValueError as exc:  # also a line over the limit, which the reader has dropped
                logger.warning("%s: malformed report on its pipe: %s", self.launch.name, exc)
                continue
            self._take(report)

    def _take(self, report: dict[str, Any]) -> None:
        match report.get("state"):
            case "starting":
                self.doing = str(report.get("detail", ""))
                self._line(self.doing)
            case "ready":
                self.state.lease = str(report.get("lease", ""))
                self.state.status_url = str(report.get("status_url", ""))
                self.facts, self.was_ready = report, True
                self._change("ready")
                self._line("ready")
            case "draining":
                self._leaves = report.get("for_good") is True
                self._change("draining")
                self._line(f"draining: {report.get('reason', '')}")
            case "drained" if self._stopping.is_set():
                self.drained = True
                self._on_change()
            case "failed":
                self._error = str(report.get("error", ""))

    def _change(self, state: str) -> None:
        if self.state.state != state:
            self.state.state = state
            self._on_change()

    def _line(self, text: str) -> None:
        self._progress.line(self.launch.name, text)

    def _start_failure(self, code: int) -> str:
        """Prints the end of its log. Returns a line with the cause."""
        path, log = self.launch.log_path, ""
        tail = "its log is above"
        if path is not None:
            with contextlib.suppress(OSError):
                log = path.read_text(encoding="utf-8", errors="replace")
            lines = log.splitlines()[-_LOG_TAIL_LINES:]
            tail = "\n".join([f"last lines of {path}:", *(f"  {line}" for line in lines)])
        self._line(f"not started; {tail}")
        cause = _INPUT.sub("", " ".join(self._error.split())).rstrip(".")
        cause = cause or f"ended before it was ready ({exit_text(code)})"
        killed = code == -signal.SIGKILL
        # vLLM says so where another of its processes has failed.
        if "root cause above" in cause:
            killed = f": {-signal.SIGKILL}" in cause
            if not killed and (raised := _RAISED.search(log)):
                cause = raised[1].rstrip(".")
        if killed:
            cause += "; most likely the memory of the host or container did not suffice"
        return f"{self.launch.name}: {cause}"


async def revoke_lease(etcd_url: str, lease_id: int) -> None:
    """Revokes the lease of a process that has died. If that fails it expires; the log says why.

    etcdctl does it: this process forks, so it must not have the threads of a gRPC client.
    """
    try:
        await etcdctl(etcd_url, "lease", "revoke", f"{lease_id:x}", timeout_s=_REVOKE_TIMEOUT_S)
    except (ConfigError, StartupError) as exc:
        if "requested lease not found" not in str(exc):
            logger.warning("lease %x was not revoked, it will expire: %s", lease_id, exc)

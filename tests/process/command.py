"""Runs `dynamo-lite` as a person would, in a process of its own."""

import asyncio
import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from dynamo_lite.cli import cli
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.planner import SupervisorReply, SupervisorRequest
from dynamo_lite.runtime.supervisor_client import order

STUB = "tests.process.stub:Front"
MODELLED = "tests.process.stub:Modelled"
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
#: For what imports vLLM.
VLLM_PATIENCE_S = 200.0

T = TypeVar("T")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and what these tests start would inherit it:
    # an ignored Ctrl-C is none.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # As under nohup. A child ignores what its parent ignores, but not what its parent handles.
    signal.signal(signal.SIGHUP, lambda *_: None)


def run(
    *arguments: str, timeout_s: float = PATIENCE_S, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end. env: the whole environment; None: ours."""
    return subprocess.run(
        [sys.executable, "-m", "dynamo_lite.cli.cli", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def invoke(
    *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As `run`, in a thread of this process: for a command that starts no other. env: more
    variables."""
    out, errors = io.StringIO(), io.StringIO()

    def body() -> int:
        try:
            cli.main()
        except SystemExit as exc:
            assert isinstance(exc.code, int | None)
            return exc.code or 0
        return 0

    with (
        mock.patch.object(sys, "argv", ["dynamo-lite", *arguments]),
        # Handlers can be set in the main thread only.
        mock.patch.object(cli, "signal"),
        mock.patch.dict(os.environ, env or {}),
        redirect_stdout(out),
        redirect_stderr(errors),
        ThreadPoolExecutor(1) as thread,
    ):
        code = thread.submit(body).result()
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def eventually(condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Asks until `condition` is true and returns what it gave. Fails with its last answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what} ({value!r})"
        time.sleep(0.02)


def _stats() -> Iterator[tuple[int, list[str]]]:
    """Process id, and state, parent, process group and more, of each process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            yield int(stat.parent.name), stat.read_text(errors="replace").rpartition(")")[2].split()


def group_members(group: int) -> list[int]:
    """Process ids, zombies apart, of a process group."""
    return [pid for pid, (state, _, own, *_) in _stats() if int(own) == group and state != "Z"]


def children_of(parent: int) -> list[int]:
    return [pid for pid, (_, its, *_) in _stats() if int(its) == parent]


def descendants_of(pid: int) -> list[int]:
    """Every process below `pid`, zombies apart."""
    parents = {child: int(its) for child, (state, its, *_) in _stats() if state != "Z"}
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


class Serving:
    """A running `dynamo-lite serve`, its output line by line, and its run.json."""

    def __init__(self, process: subprocess.Popen[str], state_dir: Path):
        self.process = process
        self.state_dir = state_dir
        self.output: list[str] = []
        self.groups: set[int] = set()
        self._lines: queue.Queue[str] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=(pipe,))
            for pipe in (process.stdout, process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def wait_line(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """The next line that contains `text`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {text!r} in: {''.join(self.output)}") from None
            if text in line:
                return line

    def run_json(self) -> dict[str, Any]:
        return json.loads((self.state_dir / "run.json").read_text())

    def processes(self) -> dict[str, dict[str, Any]]:
        """Entries of run.json by name; remembers their process groups for the last check."""
        entries = {f"{p['service']}-{p['instance']}": p for p in self.run_json()["processes"]}
        self.groups |= {entry["pid"] for entry in entries.values() if entry["pid"]}
        return entries

    def when(self, name: str, condition: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
        """Waits until the entry `name` of run.json satisfies `condition`."""

        def look() -> dict[str, Any] | None:
            entry = self.processes()[name]
            return entry if condition(entry) else None

        return eventually(look, f"{name} of {self.state_dir}/run.json")

    def signal(self, sig: int) -> None:
        self.process.send_signal(sig)

    def end(self, sig: int | None = None) -> int:
        """Waits for the end, after this signal, and returns the exit code."""
        if sig is not None:
            self.signal(sig)
        code = self.process.wait(timeout=PATIENCE_S)
        for reader in self._readers:
            reader.join()
        return code

    def nothing_left(self) -> bool:
        return not any(group_members(group) for group in self.groups)

    def _read(self, pipe: Any) -> None:
        with pipe:
            for line in pipe:
                self.output.append(line)
                self._lines.put(line)


@contextmanager
def serving(
    state_dir: Path,
    *arguments: str,
    graph: str = STUB,
    command: Sequence[str] = (sys.executable, "-m", "dynamo_lite.cli.cli"),
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    until: str = "",
) -> Iterator[Serving]:
    """Starts a graph; on the way out everything of it must be gone.

    command: another installation's `dynamo-lite`. env: the whole environment; None: ours.
    until: waits for a line with this.
    """
    process = subprocess.Popen(
        [*command, "serve", graph, "--state-dir", str(state_dir), *arguments],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    running = Serving(process, state_dir)
    try:
        if until:
            running.wait_line(until)
        yield running
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        running.end()
        eventually(running.nothing_left, f"process groups {running.groups} are empty")
    finally:
        for group in (process.pid, *running.groups):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        running.end()


def ask(graph: Serving, request: SupervisorRequest) -> SupervisorReply:
    """A refusal is a reply with its error."""
    try:
        return asyncio.run(order(graph.state_dir, request, 20))
    except Refused as exc:
        return SupervisorReply(error=str(exc))


def variable(pid: int, name: str) -> str | None:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        key, _, value = entry.decode().partition("=")
        if key == name:
            return value
    return None

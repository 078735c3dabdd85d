"""Runs `dynamo-lite` as a person would, in a process of its own."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from dynamo_lite.cli import cli
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.planner import SupervisorReply, SupervisorRequest
from dynamo_lite.runtime.supervisor_client import order
from tests.started import PATIENCE_S, ROOT, Started, eventually, group_members

STUB = "tests.process.stub:Front"
MODELLED = "tests.process.stub:Modelled"
DYNAMO_LITE = (sys.executable, "-m", "dynamo_lite.cli.cli")


def run(
    *arguments: str, timeout_s: float = PATIENCE_S, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end. env: the whole environment; None: ours."""
    return subprocess.run(
        [*DYNAMO_LITE, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def revoke_lease(
    *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`scripts/revoke_lease.py`, run to its end."""
    return subprocess.run(
        [sys.executable, "scripts/revoke_lease.py", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
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


class Serving(Started):
    """`dynamo-lite serve`, and its run.json."""

    def __init__(self, state_dir: Path, command: Sequence[str], **how: Any):
        super().__init__(command, **how)
        self.state_dir = state_dir
        self._groups: set[int] = set()

    def run_json(self) -> dict[str, Any]:
        return json.loads((self.state_dir / "run.json").read_text())

    def processes(self) -> dict[str, dict[str, Any]]:
        """Entries of run.json by name; remembers their process groups for the last check."""
        entries = {f"{p['service']}-{p['instance']}": p for p in self.run_json()["processes"]}
        self._groups |= {entry["pid"] for entry in entries.values() if entry["pid"]}
        return entries

    def when(self, name: str, condition: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
        """Waits until the entry `name` of run.json satisfies `condition`."""

        def look() -> dict[str, Any] | None:
            entry = self.processes()[name]
            return entry if condition(entry) else None

        return eventually(look, f"{name} of {self.state_dir}/run.json")

    def left(self) -> list[int]:
        members = [pid for group in self._groups for pid in group_members(group)]
        return [*super().left(), *members]


@contextmanager
def serving(
    state_dir: Path,
    *arguments: str,
    graph: str = STUB,
    command: Sequence[str] = DYNAMO_LITE,
    until: str = "",
    **how: Any,
) -> Iterator[Serving]:
    """A running graph.

    command: another installation's `dynamo-lite`. until: waits for a line with this. how: of
    `Started`.
    """
    words = [*command, "serve", graph, "--state-dir", str(state_dir), *arguments]
    with Serving(state_dir, words, **how) as running:
        if until:
            running.wait_line(until)
        yield running


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

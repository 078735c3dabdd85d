"""Starts graphs and single HTTP servers for the benchmarks, reads their metrics, ends them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from dynamo_lite.serve.run_state import ProcessState, RunState, read_run

ROOT = Path(__file__).parents[1]
TINY_MODEL = ROOT / ".dynamo-lite" / "models" / "tiny"
BENCH_MODEL = ROOT / ".dynamo-lite" / "models" / "bench"

_START_S = 240.0
_STOP_S = 90.0
_POLL_S = 0.1
#: Most time until all parts of a process use a changed live option.
_FOLLOW_S = 30.0


@dataclass(frozen=True)
class RunningGraph:
    """run: what `run.json` said when the graph was ready. folder: its state directory."""

    pid: int
    run: RunState
    folder: Path

    @property
    def port(self) -> int:
        return int(self.run.http.rpartition(":")[2])

    def process(self, service: str) -> ProcessState:
        return next(p for p in self.run.processes if p.service == service)

    def engine_pid(self, service: str) -> int:
        """The process with vLLM's engine core of the service's first process."""
        family = psutil.Process(self.process(service).pid).children(recursive=True)
        return next(each.pid for each in family if "EngineCore" in " ".join(each.cmdline()))

    def metrics(self, service: str) -> dict[str, float]:
        """The samples of the service's first process: `name{labels}` to value."""
        lines = self._status(service, "metrics").decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def set_options(self, service: str, **values: str) -> None:
        """Sets live options of a service (snake_case) and waits until its first process and its
        engine use them. Raises CalledProcessError, TimeoutExpired and TimeoutError."""
        edits = [f"{service}.{name.replace('_', '-')}={value}" for name, value in values.items()]
        command = [sys.executable, "-m", "dynamo_lite.cli.cli", "config", "set", *edits]
        command += ["--state-dir", str(self.folder)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=_FOLLOW_S)
        deadline = time.monotonic() + _FOLLOW_S
        expected = {name.replace("_", "-"): yaml.safe_load(text) for name, text in values.items()}
        while any(not expected.items() <= u.items() for u in options_in_use(self.process(service))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{service} does not follow {' '.join(edits)}")
            time.sleep(_POLL_S)

    def _status(self, service: str, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.process(service).status_url}/{path}", timeout=5) as r:
            return r.read()


def options_in_use(process: ProcessState) -> list[dict[str, Any]]:
    """The live options that are set, as the process and, of a decode worker with remote prefill,
    its engine use them: the last lines of their common log say so."""
    log = Path(process.log).read_text(errors="replace")
    parts = 2 if process.service == "VllmWorker" else 1
    said = ["{}"] * parts + re.findall(r": in effect: (.*)\n", log)
    return [json.loads(each) for each in said[-parts:]]


def make_bench_model() -> None:
    """The larger random model, unless it is there."""
    command = [sys.executable, "scripts/tiny_model.py", str(BENCH_MODEL), "bench"]
    subprocess.run(command, cwd=ROOT, check=True)


@contextlib.contextmanager
def running_graph(
    graph: str, config: str, *options: str, http: str = "Frontend"
) -> Iterator[RunningGraph]:
    """`dynamo-lite serve GRAPH -f CONFIG OPTIONS` until the context is left.

    config: empty for the defaults. http: the service with the HTTP port, which is a free one; empty
    if none has one. The state lies in a folder of its own. Exits with the end of the log when the
    graph does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="dynamo-lite-bench-") as folder:
        log_path = Path(folder) / "serve.log"
        command = [sys.executable, "-m", "dynamo_lite.cli.cli", "serve", graph]
        command += ["-f", config] if config else []
        command += [f"--{http}.port=0"] if http else []
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--state-dir", folder, *options],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            run = _until_ready(process, Path(folder), log_path, http)
            yield RunningGraph(process.pid, run, Path(folder))
        finally:
            end(process)


@contextlib.contextmanager
def running_server(module: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """`python -m MODULE ARGUMENTS FLAGS`, where FLAGS are vLLM's for the tiny model.

    The module prints `ready PID URL` when it serves. Yields the id of the process that
    answers, and its port on this machine. Exits when the module ends before that line.
    """
    flags = [f"--model={TINY_MODEL}", "--served-model-name=tiny", "--max-model-len=8192"]
    command = [sys.executable, "-m", module, *arguments, *flags, "--dtype=float32"]
    with running_process(command) as (_, (pid, url)):
        yield int(pid), int(url.rpartition(":")[2])


@contextlib.contextmanager
def running_process(command: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """A process that prints a line `ready WORDS`. Yields its id and the words; exits when it ends
    before that line."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        # Ends with the process, so it cannot wait for ever on a failed start.
        for line in process.stdout:
            if line.startswith(b"ready "):
                break
        else:
            sys.exit(f"{' '.join(command[:4])} did not come up; run `make setup` first")
        yield process.pid, line.decode().split()[1:]
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, and SIGKILL to what does not drain in time."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        # Everything below dies with its parent.
        process.kill()
        process.wait()


def _until_ready(
    process: "subprocess.Popen[bytes]", folder: Path, log_path: Path, http: str
) -> RunState:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        run = read_run(folder)
        if run is not None and run.state == "ready" and (run.http or not http):
            return run
        time.sleep(_POLL_S)
    tail = log_path.read_text(errors="replace").splitlines()[-15:]
    sys.exit("the graph did not come up:\n" + "\n".join(tail))

"""What benchmarks/disagg.py compares: dynamo-lite, and what serves the same model beside it.

Each system is two engines, pinned to a core each, behind one HTTP port.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.graph import ROOT, RunningGraph, running_graph
from dynamo_lite.serve.processes import free_port

_CONFIG = "benchmarks/disagg.yaml"
_SERVICES = ("Frontend", "VllmWorker", "PrefillWorker")
PEERS = ROOT / ".dynamo-lite" / "peers"

_START_S = 300.0
_STOP_S = 20.0
_POLL_S = 0.2


@dataclass(frozen=True)
class System:
    """A running one. pids: roots of its process trees."""

    port: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Setup:
    """router: the path of vllm-router; None: benchmarks/proxy.py stands in. dtype: of the model."""

    router: str | None
    dtype: str


def find_router() -> str | None:
    """The program of the PyPI package vllm-router, if it is installed somewhere."""
    own = PEERS / "bin" / "vllm-router"
    return shutil.which("vllm-router") or (str(own) if own.exists() else None)


@contextlib.contextmanager
def dynamo_lite(setup: Setup) -> Iterator[System]:
    with bench_graph(setup.dtype) as graph:
        yield System(graph.port, (graph.pid,))


@contextlib.contextmanager
def plain(setup: Setup, *flags: str) -> Iterator[System]:
    """Two engines that prefill and decode, behind round-robin."""
    with ExitStack() as stack:
        engines = [stack.enter_context(engine(core, setup.dtype, *flags)) for core in (0, 1)]
        urls = ready(engines)
        if setup.router is None:
            front = stack.enter_context(_proxy("round-robin", *urls))
        else:
            options = ["--policy", "round_robin", "--worker-urls", *urls]
            front = stack.enter_context(router_process(setup.router, options))
        ready([front])
        yield System(front.port, tuple(p.process.pid for p in (*engines, front)))


@contextlib.contextmanager
def plain_chunks(setup: Setup) -> Iterator[System]:
    with plain(setup, "--max-num-batched-tokens=256") as system:
        yield system


@contextlib.contextmanager
def pull(setup: Setup) -> Iterator[System]:
    """vLLM's NixlConnector: the decode engine reads the KV."""
    with _disaggregated("NixlConnector", setup.dtype) as (urls, stack, engines):
        if setup.router is None:
            front = stack.enter_context(_proxy("pull", *urls))
        else:
            options = ["--vllm-pd-disaggregation", "--policy", "round_robin"]
            options += ["--prefill", urls[0], "--decode", urls[1]]
            front = stack.enter_context(router_process(setup.router, options))
        ready([front])
        yield System(front.port, tuple(p.process.pid for p in (*engines, front)))


@contextlib.contextmanager
def push(setup: Setup) -> Iterator[System]:
    """vLLM's NixlPushConnector: the prefill engine writes the KV."""
    with _disaggregated("NixlPushConnector", setup.dtype) as (urls, stack, engines):
        front = stack.enter_context(_proxy("push", *urls))
        ready([front])
        yield System(front.port, tuple(p.process.pid for p in (*engines, front)))


#: Name -> how it is started.
SYSTEMS: dict[str, Callable[[Setup], contextlib.AbstractContextManager[System]]] = {
    "dynamo-lite": dynamo_lite,
    "plain": plain,
    "plain-256": plain_chunks,
    "pull": pull,
    "push": push,
}


@dataclass(frozen=True)
class Started:
    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


@contextlib.contextmanager
def _disaggregated(
    connector: str, dtype: str
) -> Iterator[tuple[list[str], ExitStack, list[Started]]]:
    with ExitStack() as stack:
        engines: list[Started] = []
        for core, role in enumerate(("kv_producer", "kv_consumer")):
            config = {"kv_connector": connector, "kv_role": role, "kv_buffer_device": "cpu"}
            flags = ("--kv-transfer-config", json.dumps(config))
            engines.append(stack.enter_context(engine(core, dtype, *flags)))
        yield ready(engines), stack, engines


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """The option --dtype of a benchmark with these engines."""
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        help="default bfloat16; float32 is faster on a CPU without instructions for it",
    )


def bench_graph(dtype: str) -> contextlib.AbstractContextManager[RunningGraph]:
    """benchmarks/disagg.yaml, whose model has this dtype."""
    options = [f"--{service}.dtype={dtype}" for service in _SERVICES]
    return running_graph("graphs.disagg:Frontend", _CONFIG, *options)


def engine(core: int, dtype: str, *flags: str) -> contextlib.AbstractContextManager[Started]:
    """`vllm serve` with the engine arguments of the graph's workers."""
    common = yaml.safe_load((ROOT / _CONFIG).read_text())["Common"] | {"dtype": dtype}
    arguments = [
        f"--{key}" if value is True else f"--{key}={value}" for key, value in common.items()
    ]
    port = free_port()
    # As a module: the `vllm` program asks for the version of a package of that name.
    module = "vllm.entrypoints.launchers.api_server.entry"
    command = [sys.executable, "-m", module, "--host=127.0.0.1", f"--port={port}"]
    return started(
        [*command, *arguments, *flags],
        port,
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND=str(core),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
    )


def router_process(program: str, options: list[str]) -> contextlib.AbstractContextManager[Started]:
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return started([program, *where, "--log-level", "warning", *options], port)


def _proxy(kind: str, *urls: str) -> contextlib.AbstractContextManager[Started]:
    port = free_port()
    return started([sys.executable, "-m", "benchmarks.proxy", kind, str(port), *urls], port)


@contextlib.contextmanager
def started(command: list[str], port: int, **env: str) -> Iterator[Started]:
    """A process in a group of its own, which is ended with all that it has started."""
    with tempfile.TemporaryDirectory(prefix="dynamo-lite-bench-") as folder:
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield Started(process, port, log_path)
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ready(processes: list[Started]) -> list[str]:
    """Their URLs, once all of them say that they are healthy."""
    urls = [f"http://127.0.0.1:{process.port}" for process in processes]
    deadline = time.monotonic() + _START_S
    for process, url in zip(processes, urls, strict=True):
        while not _healthy(url):
            if process.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("a peer did not come up:\n" + process.tail())
            time.sleep(_POLL_S)
    return urls


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False

"""Running graphs and the plain vLLM server that they are measured against.

Both are subprocesses in directories of their own, on free ports, and die with the test run.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import NoResponders
from dynamo_lite.protocol.health import EngineStatus, decode_engine_status
from dynamo_lite.protocol.kv_regions import decode_engine
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.run_state import ProcessState, RunState, read_run
from dynamo_lite.vllm.args import engine_flags
from tests.ports import reserved_port
from tests.process.command import DYNAMO_LITE
from tests.started import Started, descendants_of, eventually

MODEL = Path(".dynamo-lite/models/tiny")
DISAGG = ("graphs.disagg:Frontend", "configs/disagg.yaml")
AGG = ("graphs.agg:Frontend", "configs/agg.yaml")
NAMESPACE = "dynamo"
#: Else the first request for logprobs waits some ten seconds for a C++ compiler.
UNCOMPILED = {"TORCH_COMPILE_DISABLE": "1"}
#: Leases that outlast the tests' pauses. A worker that joins must have the same.
PAIR_LEASE = "--Graph.lease-ttl-s=60"
#: Two decode workers and one prefill worker.
PAIR_OPTIONS = (
    *("--VllmWorker.ServiceArgs.workers=2", PAIR_LEASE, "--Frontend.router=kv"),
    *(f"--VllmWorker.ServiceArgs.env.{key}={value}" for key, value in UNCOMPILED.items()),
)
#: Flags of vLLM's server without which it refuses tools; the same for both sides.
TOOL_FLAGS = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
#: Of vLLM's verdicts on arguments, whose parsers take seconds.
CACHE = Path(".dynamo-lite/cache")
_READY_S = 180.0
#: Several of them may start at the same time, on a busy machine.
_PLAIN_READY_S = 300.0
_POLL_S = 0.05

_T = TypeVar("_T")


async def reached(ask: Callable[[], _T], *, timeout_s: float, what: str) -> _T:
    """`eventually`, while the event loop goes on."""
    return await asyncio.to_thread(eventually, ask, timeout_s=timeout_s, what=what)


class Graph(Started):
    """`dynamo-lite serve GRAPH -f FILE OPTIONS` on a private state directory.

    service: the one service to start alone, on the servers that the options name. http: the
    service with the HTTP port.
    """

    def __init__(
        self,
        directory: Path,
        graph: tuple[str, str] = DISAGG,
        options: Sequence[str] = (),
        service: str = "",
        http: str = "Frontend",
    ):
        name, file = graph
        alone = ["--service-name", service] if service else []
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(
            [
                *(*DYNAMO_LITE, "serve", name, "-f", file),
                *("--state-dir", str(directory), f"--{http}.port=0", *alone, *options),
            ],
            log=directory / "output.log",
        )
        self.directory = directory
        self.state_dir = directory / "lone" / f"{service}-0" if service else directory

    def __enter__(self) -> Self:
        self.start()
        self.wait_until(self.is_ready, _READY_S)
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed:
            self.end(signal.SIGKILL)
        else:
            self.stop()

    def start(self) -> None:
        CACHE.mkdir(parents=True, exist_ok=True)
        (self.directory / "cache").symlink_to(CACHE.resolve())
        super().start()

    def stop(self) -> None:
        """An orderly stop must end in order."""
        code = self.end(signal.SIGINT)
        assert code == 0, f"serve ended with {code}\n{self.tails()}"

    def tails(self) -> str:
        logs = sorted(self.directory.glob("**/logs/*.log"))
        ends = (log.read_text(errors="replace").splitlines()[-40:] for log in logs)
        named = (line for log, end in zip(logs, ends, strict=True) for line in (f"--- {log}", *end))
        return "\n".join([super().tails(), *named])

    def errors(self) -> list[str]:
        """Lines of the processes' logs that speak of something broken."""
        return [
            f"{log.name}: {line}"
            for log in self.directory.glob("**/logs/*.log")
            for line in log.read_text(errors="replace").splitlines()
            if " ERROR " in line or "Traceback" in line
        ]

    @property
    def run(self) -> RunState:
        state = read_run(self.state_dir)
        assert state is not None, f"no graph runs on {self.state_dir}\n{self.tails()}"
        return state

    @property
    def url(self) -> str:
        return self.run.http

    @property
    def nats_url(self) -> str:
        return self.run.nats

    @property
    def etcd_url(self) -> str:
        return self.run.etcd

    @property
    def servers(self) -> list[str]:
        """Options of `serve` for a service that joins this graph."""
        return ["--nats-url", self.nats_url, "--etcd-url", self.etcd_url]

    def messaging(self) -> NatsMessaging:
        """A context: messages as this graph's own processes send them."""
        return NatsMessaging(self.nats_url)

    def processes(self, component: str = "") -> list[ProcessState]:
        return [p for p in self.run.processes if component in ("", p.service)]

    def process(self, component: str, instance: int = 0) -> ProcessState:
        return next(p for p in self.processes(component) if p.instance == instance)

    def _ready(self, component: str) -> list[ProcessState]:
        return [p for p in self.processes(component) if p.state == "ready"]

    def count(self, component: str, name: str, **labels: str) -> float:
        """Sum of a metric's samples over the live instances and over other labels."""
        return sum(sample_sum(p.status_url, name, **labels) for p in self._ready(component))

    def metrics(self, component: str) -> dict[str, float]:
        """All samples of a component, e.g. `name{reason="long",verdict="remote"}`."""
        totals: dict[str, float] = {}
        for process in self._ready(component):
            for name, labels, value in samples(process.status_url):
                text = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
                key = f"{name}{{{text}}}" if text else name
                totals[key] = totals.get(key, 0.0) + value
        return totals

    def log_of(self, component: str, instance: int = 0) -> str:
        return Path(self.process(component, instance).log).read_text(errors="replace")

    def health(self, component: str, instance: int = 0) -> dict[str, Any]:
        return health_of(self.process(component, instance))

    def descendants(self) -> list[int]:
        return descendants_of(self.pid)

    def engine_pid(self, component: str, instance: int = 0) -> int:
        """The process in which vLLM's engine core of that instance runs."""
        [engine] = engine_pids(self.process(component, instance).pid)
        return engine

    async def records(self) -> list[EndpointRecord]:
        async with EtcdStore(self.etcd_url) as store:
            found = await store.get_prefix(names.components_prefix(NAMESPACE))
        return [decode_json(value, EndpointRecord) for _, value in sorted(found.items())]

    async def pools(self) -> list[EngineStatus]:
        """How the decode engines' blocks stand; see `asking_pools`."""
        async with self.asking_pools() as ask:
            return await ask()

    @contextlib.asynccontextmanager
    async def asking_pools(self) -> AsyncIterator[Callable[[], Awaitable[list[EngineStatus]]]]:
        """For questions to the decode engines themselves. Leaves out killed engines, whose keys
        live as long as their lease."""
        async with EtcdStore(self.etcd_url) as store, self.messaging() as messaging:

            async def ask() -> list[EngineStatus]:
                found = await decode_engines(store, messaging)
                return [status for status in found.values() if status is not None]

            yield ask

    async def settled(self, free_blocks: int | None = None, *, timeout_s: float = 30.0) -> None:
        """Returns when no decode engine holds, awaits or sees queued anything.

        free_blocks: what must be free then, in all of them together.
        """
        found: list[tuple[int | None, ...]] = []
        try:
            async with asyncio.timeout(timeout_s), self.asking_pools() as ask:
                while True:
                    pools = await ask()
                    found = [(p.free_blocks, p.waiting, p.quarantined, p.queue_jobs) for p in pools]
                    free = sum(pool.free_blocks for pool in pools)
                    quiet = all(state[1:] == (0, 0, 0) for state in found)
                    if pools and quiet and free_blocks in (None, free):
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(f"not settled at {free_blocks} free blocks: {found}") from None

    def is_ready(self) -> bool:
        return any(line.startswith("ready ") for line in self.output.splitlines())


class Lone(Graph):
    """One service alone, on the servers that `servers` names. changes: of its section."""

    def __init__(
        self, directory: Path, service: str, servers: Sequence[str], changes: Mapping[str, Any]
    ):
        changed = [f"--{service}.{key}={json.dumps(value)}" for key, value in changes.items()]
        super().__init__(directory, options=[*servers, *changed], service=service)
        self._service = service

    def handed_over(self) -> float:
        """Remote prefills that it has written, or was written."""
        name, outcome = {
            "PrefillWorker": ("dynamo_lite_prefill_jobs_total", "written"),
            "VllmWorker": ("dynamo_lite_remote_prefills_total", "committed"),
        }[self._service]
        return self.count(self._service, name, outcome=outcome)


@contextlib.contextmanager
def together(graphs: Sequence[Graph]) -> Iterator[None]:
    """Started side by side: one alone leaves cores idle."""
    with contextlib.ExitStack() as stack:
        for graph in graphs:
            graph.start()
            stack.callback(graph.stop)
        for graph in graphs:
            graph.wait_until(graph.is_ready, _READY_S)
        yield


class PlainServer(Started):
    """Stock `vllm serve` with the engine arguments of a configuration's VllmWorker.

    It is started as vLLM's module (`plain.py`): the `vllm` program asks for the version of a
    package of that name, which the CPU build is not. `url` waits until it is ready, so that it may
    start while a graph starts. flags, env: more of them.
    """

    def __init__(
        self,
        directory: Path,
        graph: tuple[str, str] = DISAGG,
        flags: Mapping[str, Any] = MappingProxyType({}),
        env: Mapping[str, str] = MappingProxyType({}),
    ):
        name, file = graph
        document = read_document(Path(file), [])
        config = resolve(load_graph(name), document).get("VllmWorker")
        document.raise_mistakes()
        assert config is not None
        self._url = f"http://127.0.0.1:{reserved_port()}"
        self._was_ready = False
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(
            [
                *(sys.executable, "-m", "tests.vllm.plain"),
                *("--host", "127.0.0.1", "--port", self._url.rpartition(":")[2]),
                *engine_flags({**config.flags, **TOOL_FLAGS, **flags}),
            ],
            env={**os.environ, **config.env, "VLLM_NO_USAGE_STATS": "1", **UNCOMPILED, **env},
            log=directory / "output.log",
        )

    @property
    def url(self) -> str:
        if not self._was_ready:
            self.wait_until(self.is_ready, _PLAIN_READY_S)
            self._was_ready = True
        return self._url

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


async def decode_engines(
    store: EtcdStore, messaging: NatsMessaging, namespace: str = NAMESPACE
) -> dict[str, EngineStatus | None]:
    """By their ids, as they describe themselves; None of one that has gone, whose key lives on.
    Raises DynamoLiteError."""
    found: dict[str, EngineStatus | None] = {}
    for value in (await store.get_prefix(names.nixl_metadata_prefix(namespace))).values():
        engine_id = decode_engine(value).engine_id
        subject = names.describe_subject(namespace, engine_id)
        found[engine_id] = None
        with contextlib.suppress(NoResponders):
            reply = await messaging.request(subject, b"", timeout_s=5.0)
            found[engine_id] = decode_engine_status(reply)
    return found


def health_of(process: ProcessState) -> dict[str, Any]:
    """Also of a process that leaves, and answers 503."""
    return httpx.get(f"{process.status_url}/health", timeout=10).json()


def samples(status_url: str) -> list[tuple[str, dict[str, str], float]]:
    text = httpx.get(f"{status_url}/metrics", timeout=10).text
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def sample_sum(status_url: str, name: str, **labels: str) -> float:
    return sum(
        value
        for found, has, value in samples(status_url)
        if found == name and labels.items() <= has.items()
    )


def engine_pids(pid: int) -> list[int]:
    """The processes below this one in which engine cores run."""
    return [one for one in descendants_of(pid) if "EngineCore" in command_line(one)]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""

"""The graph that is broken on purpose, with a broker and a store beside it.

Those two belong to this process, not to `dynamo-lite serve`, so that they can
be frozen, killed and come back with their data or without. Everything lies in
one directory; nothing is left running when the context is left.
"""

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats
from dynamo_lite.serve.run_state import ProcessState, read_run
from tests.ports import reserved_port
from tests.servers import PrivateServer
from tests.vllm.graph import Graph, engine_pids

CONFIG = ("graphs.disagg_router:Frontend", "configs/chaos.yaml")
FRONTEND, DECODE, PREFILL = "Frontend", "VllmWorker", "PrefillWorker"
ROUTER = "Router"

_POLL_S = 0.1
_READY_S = 240.0


@dataclass(frozen=True)
class Member:
    """One instance that a supervisor keeps. `state` is as fresh as its run.json."""

    name: str
    graph: Graph = field(repr=False)
    service: str
    instance: int

    @property
    def state(self) -> ProcessState:
        return self.graph.process(self.service, self.instance)

    @property
    def ready(self) -> bool:
        return self.state.state == "ready"

    @property
    def engine_pid(self) -> int:
        """Of its EngineCore process; 0 while there is none."""
        return next(iter(engine_pids(pid) if (pid := self.state.pid) else ()), 0)


class Cluster:
    """Async context manager; entering it takes as long as the graph's start.

    unclean: what did not end as it should, known after the context was left.
    """

    def __init__(self, directory: Path, options: Sequence[str] = ()):
        self.directory = directory
        self.nats = PrivateServer(EmbeddedNats, directory / "nats")
        self.etcd = PrivateServer(EmbeddedEtcd, directory / "etcd")
        self.port = reserved_port()
        self._excuses: list[tuple[str, Callable[[], float]]] = []
        self.unclean: list[str] = []
        self._options = options
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for server in (self.nats, self.etcd):
                await server.start()
                stack.push_async_callback(server.stop)
            urls = ("--nats-url", self.nats.url, "--etcd-url", self.etcd.url)
            options = [f"--Frontend.port={self.port}", *self._options, *urls]
            self.graph = Graph(self.directory / "graph", CONFIG, options)
            stack.push_async_callback(self._end_graph)
            # From this thread: the kernel's death signal comes with the end of a thread.
            self.graph.start()
            await asyncio.to_thread(self.graph.wait_until, self.graph.is_ready, _READY_S)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in (self.nats, self.etcd):
            server.thaw()
        await self._stack.aclose()

    def members(self, service: str = "") -> list[Member]:
        """Those that run or will run again. None before the graph has written down any, and after
        its end."""
        run = read_run(self.graph.state_dir)
        return [
            Member(f"{p.service}-{p.instance}", self.graph, p.service, p.instance)
            for p in (() if run is None else run.processes)
            if service in ("", p.service) and p.state != "stopped"
        ]

    def ready(self, service: str) -> list[Member]:
        return [member for member in self.members(service) if member.ready]

    async def until(self, reached: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        """Raises TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                while not reached():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}") from None

    def excuse(self, began: float) -> str:
        """Why a request that was under way since `began` could not but break, or ""."""
        return next((why for why, over in self._excuses if began <= over()), "")

    @contextlib.contextmanager
    def excusing(self, why: str) -> Iterator[None]:
        """What is under way at any moment of the body may break, because of us."""
        over = math.inf
        self._excuses.append((why, lambda: over))
        try:
            yield
        finally:
            over = time.monotonic()

    async def _end_graph(self) -> None:
        try:
            code = await asyncio.to_thread(self.graph.end, signal.SIGINT)
        except AssertionError as exc:
            self.unclean.append(str(exc))
        else:
            if code:
                self.unclean.append(f"serve ended with {code}")

"""CPU time that TLS costs the Frontend and a worker, per streamed request."""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.command import begin, parser_of, until_interrupted, write_json
from benchmarks.direct import DirectClient, direct_client
from benchmarks.figures import spread, verdict
from benchmarks.graph import RunningGraph, running_graph
from benchmarks.null_worker import BUSY_WORKER
from benchmarks.runtime import Meter, load, load_directly
from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats

FRONTEND_TARGET = 1.05
WORKER_TARGET = 1.10
#: Options of `serve` for TLS.
ON = ("--Graph.bind-host=0.0.0.0",)

_WORKERS = ("VllmWorker", BUSY_WORKER)
#: Graph, configuration and service with the HTTP port.
_WITH_FRONTEND = ("Frontend", "benchmarks/null.yaml", "Frontend")
_IDLE_S = 5.0
#: More requests where each costs little: the system counts in steps of 10 ms.
_BUSY_TIMES = 10

_ABOUT = """\
Two graphs answer the same streamed chat requests of 64 tokens, in turn. Both have
the shipped Frontend and decode worker; the engines compute nothing.

  on   as `serve` starts a graph whose address other hosts reach: TLS on the
       connections between Frontend and workers, TLS to etcd
  off  no TLS, on a nats-server and an etcd without authentication

As in `benchmarks.runtime` a worker is measured at the pace of --step-ms and busy,
its steps following one another. The numbers are CPU time of each process from
/proc, less what the process uses when idle. Each ratio compares two loads that ran
right after each other; which of them is first changes from round to round.
"""


#: A graph, and what it costs.
G = TypeVar("G")
C = TypeVar("C")


@dataclass(frozen=True)
class Costs:
    """CPU milliseconds per request, of one graph in one round. frontend: None without one."""

    frontend: float | None
    worker: float
    busy_worker: float


@dataclass(frozen=True)
class Round:
    on: Costs
    off: Costs

    def ratio(self, name: str) -> float:
        return getattr(self.on, name) / getattr(self.off, name)


class Measured:
    """One of the graphs. clients: of its worker and of its busy worker."""

    def __init__(self, graph: RunningGraph, clients: tuple[DirectClient, DirectClient]):
        self._graph = graph
        self._worker_client, self._busy_client = clients
        self._worker, self._busy = (Meter(graph.process(name).pid) for name in _WORKERS)
        has_http = bool(graph.run.http)
        self._frontend = Meter(graph.process("Frontend").pid) if has_http else None

    @property
    def meters(self) -> list[Meter]:
        return [m for m in (self._frontend, self._worker, self._busy) if m is not None]

    async def costs(self, requests: int, concurrency: int) -> Costs:
        frontend_ms: float | None = None
        self._worker.start()
        if self._frontend is None:
            await load_directly(self._worker_client, requests, concurrency)
        else:
            self._frontend.start()
            await load(self._graph.port, requests, concurrency)
            frontend_ms = self._frontend.used_ms() / requests
        worker_ms = self._worker.used_ms() / requests
        self._busy.start()
        await load_directly(self._busy_client, _BUSY_TIMES * requests, concurrency)
        return Costs(frontend_ms, worker_ms, self._busy.used_ms() / (_BUSY_TIMES * requests))


def parser_of_rounds(name: str, about: str, requests: int) -> argparse.ArgumentParser:
    """requests: the default."""
    parser = parser_of(name, about)
    parser.add_argument("--rounds", type=int, help="of both graphs (default 9; 3 with --quick)")
    parser.add_argument(
        "--requests", type=int, default=requests, help="per round (default %(default)s)"
    )
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--quick", action="store_true", help="three rounds, for trying")
    return parser


def begin_rounds(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = begin(parser)
    options.rounds = options.rounds or (3 if options.quick else 9)
    return options


async def in_turn(
    rounds: int, on: G, off: G, costs_of: Callable[[G], Awaitable[C]]
) -> AsyncIterator[tuple[C, C]]:
    """The costs of `on` and of `off` in each round. Which of them is first changes."""
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        if number % 2:
            costs = await costs_of(on)
            yield costs, await costs_of(off)
        else:
            costs = await costs_of(off)
            yield await costs_of(on), costs


def main() -> None:
    parser = parser_of_rounds("tls", _ABOUT, 200)
    parser.add_argument("--step-ms", type=float, default=4.0, help="engine step (default 4)")
    parser.add_argument(
        "--workers", action="store_true", help="without Frontends; the workers are asked directly"
    )
    options = begin_rounds(parser)
    rounds: list[Round] = []
    with until_interrupted():
        asyncio.run(measure(options, rounds))
    if rounds:
        report(rounds, options)
    write_json(options.json, [asdict(one) for one in rounds])


async def measure(options: argparse.Namespace, rounds: list[Round]) -> None:
    """Adds to `rounds`."""
    async with AsyncExitStack() as stack:
        on = await started(stack, options, *ON)
        off = await started(stack, options, *await open_servers(stack))
        for measured in (on, off):
            await measured.costs(4 * options.concurrency, options.concurrency)
        meters = (*on.meters, *off.meters)
        for meter in meters:
            meter.start()
        await asyncio.sleep(_IDLE_S)
        for meter in meters:
            meter.note_idle()

        async def costs_of(measured: Measured) -> Costs:
            return await measured.costs(options.requests, options.concurrency)

        async for costs in in_turn(options.rounds, on, off, costs_of):
            rounds.append(Round(*costs))


async def open_servers(stack: AsyncExitStack) -> tuple[str, ...]:
    """Options of `serve` for a graph on servers without authentication, which end with `stack`."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-lite-bench-")))
    nats = await stack.enter_async_context(EmbeddedNats(folder / "nats"))
    etcd = await stack.enter_async_context(EmbeddedEtcd(folder / "etcd"))
    return "--nats-url", nats.url, "--etcd-url", etcd.url


async def started(stack: AsyncExitStack, options: argparse.Namespace, *flags: str) -> Measured:
    step = f"--VllmWorker.step-s={options.step_ms / 1000:g}"
    name, config, http = ("Workers", "", "") if options.workers else _WITH_FRONTEND
    graph = stack.enter_context(
        running_graph(f"benchmarks.tls_worker:{name}", config, step, *flags, http=http)
    )
    worker, busy = [
        await stack.enter_async_context(direct_client(graph.run, name)) for name in _WORKERS
    ]
    return Measured(graph, (worker, busy))


def report(rounds: list[Round], options: argparse.Namespace) -> None:
    print(f"CPU per streamed 64-token chat request, {options.concurrency} at a time,")
    print(f"{len(rounds)} rounds of {options.requests}; median (lowest to highest)\n")
    pace = f"worker, {options.step_ms:g} ms a step"
    for name, title, target in (
        ("frontend", "Frontend", FRONTEND_TARGET),
        ("worker", pace, WORKER_TARGET),
        ("busy_worker", "worker, busy", WORKER_TARGET),
    ):
        if getattr(rounds[0].on, name) is None:
            continue
        on = [getattr(one.on, name) for one in rounds]
        off = [getattr(one.off, name) for one in rounds]
        ratios = [one.ratio(name) for one in rounds]
        met = statistics.median(ratios) <= target
        print(f"{title:20} on {spread(on)} ms, off {spread(off)} ms")
        print(f"{'':20} on / off {spread(ratios)} x{verdict(met, target)}")


if __name__ == "__main__":
    main()

"""CPU time that TLS costs a decode worker with vLLM, per streamed request."""

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.command import until_interrupted, write_json
from benchmarks.disagg import cpu_s
from benchmarks.figures import spread, verdict
from benchmarks.graph import RunningGraph, running_graph
from benchmarks.runtime import load
from benchmarks.tls import (
    ON,
    WORKER_TARGET,
    begin_rounds,
    in_turn,
    open_servers,
    parser_of_rounds,
)

_GRAPH = ("graphs.agg:Frontend", "configs/agg.yaml")
_ABOUT = """\
Two graphs of configs/agg.yaml with the tiny model answer the same streamed chat
requests of 64 tokens, in turn:

  on   as `serve` starts a graph whose address other hosts reach: TLS on the
       connections between Frontend and worker, TLS to etcd
  off  no TLS, on a nats-server and an etcd without authentication

Counted is the CPU time of the decode worker and its engine. The tiny model computes
less than any other, so this is the highest share that TLS can have on one core.
`benchmarks.tls` has workers whose engines compute nothing.
"""


@dataclass(frozen=True)
class Round:
    """CPU milliseconds per request of the worker and its engine."""

    on: float
    off: float


def main() -> None:
    options = begin_rounds(parser_of_rounds("tls_engine", _ABOUT, 64))
    rounds: list[Round] = []
    with until_interrupted():
        asyncio.run(measure(options, rounds))
    if rounds:
        report(rounds, options)
    write_json(options.json, [asdict(one) for one in rounds])


async def measure(options: argparse.Namespace, rounds: list[Round]) -> None:
    """Adds to `rounds`."""
    async with AsyncExitStack() as stack:
        on = stack.enter_context(running_graph(*_GRAPH, *ON))
        off = stack.enter_context(running_graph(*_GRAPH, *await open_servers(stack)))
        cost_ms = partial(_cost_ms, options=options)
        for graph in (on, off):
            await cost_ms(graph)
        async for costs in in_turn(options.rounds, on, off, cost_ms):
            rounds.append(Round(*costs))


async def _cost_ms(graph: RunningGraph, options: argparse.Namespace) -> float:
    worker = (graph.process("VllmWorker").pid,)  # its engine is below it
    before_s = cpu_s(worker)
    await load(graph.port, options.requests, options.concurrency)
    return 1000 * (cpu_s(worker) - before_s) / options.requests


def report(rounds: list[Round], options: argparse.Namespace) -> None:
    print(f"CPU per streamed 64-token chat request, {options.concurrency} at a time,")
    print(f"{len(rounds)} rounds of {options.requests}; median (lowest to highest)\n")
    ratios = [one.on / one.off for one in rounds]
    on, off = [one.on for one in rounds], [one.off for one in rounds]
    print(f"worker and its engine  on {spread(on)} ms, off {spread(off)} ms")
    met = statistics.median(ratios) <= WORKER_TARGET
    print(f"on / off {spread(ratios)} x{verdict(met, WORKER_TARGET)}")


if __name__ == "__main__":
    main()

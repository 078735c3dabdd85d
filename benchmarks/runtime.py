"""CPU time per streamed 64-token chat request of the runtime around an engine."""

import argparse
import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from benchmarks.client import connect
from benchmarks.command import begin, parser_of, write_json
from benchmarks.direct import DirectClient, direct_client
from benchmarks.figures import verdict
from benchmarks.graph import running_graph, running_server
from benchmarks.null_worker import BUSY_WORKER

MAX_RATIO = 1.3
MAX_WORKER_MS = 0.3

TOKENS = 64
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me what a token costs."}],
    "max_tokens": TOKENS,
}

_SAME_EVENTS = 2.0
#: More requests where each costs little: the system counts in steps of 10 ms.
_BUSY_TIMES = 5

_ABOUT = f"""\
Two HTTP servers answer the same streamed chat requests of {TOKENS} tokens, in turn:

  graph  the real Frontend, and a worker process with the real generate endpoint
         over NATS and TCP; its engine computes nothing
  plain  vLLM's own OpenAI app over an engine core in the same process that
         computes nothing either, so there is no transport at all

Both engines make a step each --step-ms, as a model would: steps without a pause
would be merged before they reach the client, and cost less than real ones.

A process that wakes up for each step pays for that on most machines, whatever it
then does. So the worker is measured twice: at that pace, and busy, asked without a
Frontend, its steps following one another. Its engine's own work is included.

The numbers are CPU time of each process from /proc, less what the process uses when
idle (see `benchmarks.idle` for that); the ratio compares rounds that ran right
after each other, so it bears other load on the machine better than they do.
"""


@dataclass(frozen=True)
class Row:
    """CPU milliseconds per request, of one round."""

    frontend_ms: float
    worker_ms: float
    plain_ms: float
    busy_worker_ms: float

    @property
    def ratio(self) -> float:
        return self.frontend_ms / self.plain_ms


def main() -> None:
    parser = parser_of("runtime", _ABOUT)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (default 5)")
    parser.add_argument("--requests", type=int, default=200, help="per round (default 200)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--step-ms", type=float, default=4.0, help="engine step (default 4)")
    parser.add_argument("--idle-s", type=float, default=5.0, help="idle time seen (default 5)")
    options = begin(parser)
    rows, events = asyncio.run(measure(options))
    report(rows, events, options)
    write_json(options.json, [asdict(row) for row in rows])


async def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, float]]:
    """The rounds, and the events per answer of both servers."""
    step_s = options.step_ms / 1000
    flags = [f"--VllmWorker.step-s={step_s:g}"]
    async with AsyncExitStack() as stack:
        pid, plain_port = stack.enter_context(running_server("benchmarks.plain_app", f"{step_s:g}"))
        plain = Meter(pid)
        graph = stack.enter_context(
            running_graph("benchmarks.null_worker:Frontend", "benchmarks/null.yaml", *flags)
        )
        frontend = Meter(graph.process("Frontend").pid)
        worker = Meter(graph.process("VllmWorker").pid)
        busy = Meter(graph.process(BUSY_WORKER).pid)
        meters = (frontend, worker, plain, busy)
        direct = await stack.enter_async_context(direct_client(graph.run, BUSY_WORKER))
        for port in (plain_port, graph.port):
            await load(port, 4 * options.concurrency, options.concurrency)
        await load_directly(direct, 4 * options.concurrency, options.concurrency)
        for meter in meters:
            meter.start()
        await asyncio.sleep(options.idle_s)
        for meter in meters:
            meter.note_idle()
        rows: list[Row] = []
        events: dict[str, float] = {}
        for _ in range(options.rounds):
            frontend.start()
            worker.start()
            events["graph"] = await load(graph.port, options.requests, options.concurrency)
            used = frontend.used_ms(), worker.used_ms()
            plain.start()
            events["plain"] = await load(plain_port, options.requests, options.concurrency)
            used += (plain.used_ms(),)
            busy.start()
            await load_directly(direct, _BUSY_TIMES * options.requests, options.concurrency)
            used += (busy.used_ms() / _BUSY_TIMES,)
            rows.append(Row(*(milliseconds / options.requests for milliseconds in used)))
    return rows, events


async def load_directly(client: DirectClient, requests: int, concurrency: int) -> None:
    left = iter(range(requests))

    async def one_after_the_other() -> None:
        for _ in left:
            await client.generate(TOKENS)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_the_other())


class Meter:
    """CPU time of one process, its threads included."""

    def __init__(self, pid: int):
        self._process = psutil.Process(pid)
        self._idle_share = 0.0
        self.start()

    def start(self) -> None:
        self._started, self._before_s = time.monotonic(), self._cpu_s()

    def note_idle(self) -> None:
        """Nothing was asked of the process since `start`."""
        self._idle_share = (self._cpu_s() - self._before_s) / (time.monotonic() - self._started)

    def used_ms(self) -> float:
        """Since `start`, beyond what it uses when idle."""
        idle_s = self._idle_share * (time.monotonic() - self._started)
        return 1000 * (self._cpu_s() - self._before_s - idle_s)

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


async def load(port: int, requests: int, concurrency: int) -> float:
    """Sends `requests` over `concurrency` connections; returns the mean events per answer."""
    events = 0
    left = iter(range(requests))

    async def client() -> None:
        nonlocal events
        async with connect(port) as connection:
            for _ in left:
                answer = await connection.stream("/v1/chat/completions", BODY)
                events += len(answer.events)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return events / requests


def report(rows: list[Row], events: dict[str, float], options: argparse.Namespace) -> None:
    print(f"CPU per streamed {TOKENS}-token chat request, {options.concurrency} at a time,")
    print(f"{options.rounds} rounds of {options.requests}; median (lowest to highest)\n")
    frontend = line("Frontend", [row.frontend_ms for row in rows], "ms")
    plain = line("vLLM's app alone", [row.plain_ms for row in rows], "ms")
    ratio = line("Frontend / app alone", [row.ratio for row in rows], "x", MAX_RATIO)
    busy = line("worker, busy", [row.busy_worker_ms for row in rows], "ms", MAX_WORKER_MS)
    worker = line(f"worker, {options.step_ms:g} ms a step", [row.worker_ms for row in rows], "ms")
    print("\n".join((frontend, plain, ratio, busy, worker)))
    counts = ", ".join(f"{name} {count:.1f}" for name, count in events.items())
    print(f"\nevents per answer: {counts}")
    if abs(events["graph"] - events["plain"]) > _SAME_EVENTS:
        print("steps were merged: not comparable; try a larger --step-ms or a quieter machine")


def line(name: str, values: list[float], unit: str, target: Any = None) -> str:
    middle = statistics.median(values)
    text = f"{name:22}{middle:8.2f} {unit:3}({min(values):.2f} to {max(values):.2f})"
    if target is not None:
        text += verdict(middle <= target, target)
    return text


if __name__ == "__main__":
    main()

"""CPU time per streamed 64-token chat request of the two HTTP edges."""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.command import begin, parser_of, write_json
from benchmarks.figures import spread, verdict
from benchmarks.graph import (
    ROOT,
    RunningGraph,
    running_graph,
    running_server,
)
from benchmarks.runtime import TOKENS, Meter, load
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.compat import vllm_version
from dynamo_lite.vllm.edge_choice import PROGRAM, beside_vllm, find_program

MAX_RATIO = 1.5
KEPT = ROOT / ".dynamo-lite" / PROGRAM

_ABOUT = f"""\
Three HTTP servers answer the same streamed chat requests of {TOKENS} tokens, in turn:

  python  the real Frontend with `edge: python`, and a worker that computes nothing
  rust    the real Frontend with `edge: rust`, and such a worker; its numbers are those
          of both processes, the dispatcher and vllm-rs
  alone   vllm-rs over an engine that computes nothing, without any dispatcher; its
          numbers are those of vllm-rs alone

All engines make a step each --step-ms. The numbers are CPU time from /proc, less what
the processes use when idle. The ratios compare rounds that ran right after each other.
"""


@dataclass(frozen=True)
class Round:
    """One server at one concurrency. dispatcher_ms: the part of cpu_ms that is not vllm-rs."""

    server: str
    concurrency: int
    cpu_ms: float
    dispatcher_ms: float
    tokens_per_s: float
    events: float


@dataclass(frozen=True)
class Server:
    """python: its Python processes; rust: its vllm-rs."""

    name: str
    port: int
    python: tuple[Meter, ...] = ()
    rust: tuple[Meter, ...] = ()

    @property
    def meters(self) -> tuple[Meter, ...]:
        return self.python + self.rust


def main() -> None:
    parser = parser_of("edge", _ABOUT)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (default 5)")
    parser.add_argument(
        "--requests", type=int, default=10, help="per round and connection (default 10)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 16, 64],
        help="requests at a time (default 1 16 64)",
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="engine step (default 10)")
    parser.add_argument("--idle-s", type=float, default=5.0, help="idle time seen (default 5)")
    parser.add_argument("--binary", help=f"{PROGRAM} (default: beside vLLM, or {KEPT})")
    options = begin(parser)
    try:
        program = find_vllm_rs(options.binary)
    except StartupError as exc:
        sys.exit(f"{exc}; run scripts/get_vllm_rs first")
    rounds = measure(options, program)
    report(rounds)
    write_json(options.json, [asdict(one) for one in rounds])


def find_vllm_rs(given: str | None) -> Path:
    """Raises StartupError when it is not there, or is another version's."""
    return find_program(given or str(beside_vllm() or KEPT), vllm_version())


def measure(options: argparse.Namespace, program: Path) -> list[Round]:
    step_s = options.step_ms / 1000
    rounds: list[Round] = []
    with ExitStack() as stack:
        servers = [
            alone(stack, program, step_s),
            rust_edge(stack, program, step_s),
            graph(stack, "python", step_s),
        ]
        for server in servers:
            asyncio.run(load(server.port, 64, 16))
        note_idle(servers, options.idle_s)
        for number in range(options.rounds):
            for concurrency in options.concurrency:
                for server in servers if number % 2 else reversed(servers):
                    rounds.append(one_round(server, concurrency, options.requests))
    return rounds


def note_idle(servers: Sequence[Server], seconds: float) -> None:
    """Nothing is asked of the servers meanwhile."""
    for meter in (meter for server in servers for meter in server.meters):
        meter.start()
    time.sleep(seconds)
    for meter in (meter for server in servers for meter in server.meters):
        meter.note_idle()


def one_round(server: Server, concurrency: int, each: int) -> Round:
    requests = concurrency * each
    for meter in server.meters:
        meter.start()
    began = time.monotonic()
    events = asyncio.run(load(server.port, requests, concurrency))
    seconds = time.monotonic() - began
    python, rust = (
        sum(meter.used_ms() for meter in meters) / requests
        for meters in (server.python, server.rust)
    )
    speed = requests * TOKENS / seconds
    print(
        f"{server.name:8}{concurrency:4} {python + rust:8.2f} ms {speed:8.0f} tokens/s",
        file=sys.stderr,
        flush=True,
    )
    return Round(server.name, concurrency, python + rust, python, speed, events)


def graph(stack: ExitStack, name: str, step_s: float, *options: str) -> Server:
    running: RunningGraph = stack.enter_context(
        running_graph(
            "benchmarks.null_worker:Frontend",
            "benchmarks/null.yaml",
            f"--VllmWorker.step-s={step_s:g}",
            *options,
        )
    )
    pids = [process.pid for process in running.run.processes if process.service == "Frontend"]
    children = [child for pid in pids for child in psutil.Process(pid).children()]
    rust = tuple(Meter(child.pid) for child in children if child.name() == PROGRAM)
    return Server(name, running.port, tuple(Meter(pid) for pid in pids), rust)


def rust_edge(stack: ExitStack, program: Path, step_s: float) -> Server:
    edge = "--Frontend.edge=rust", f"--Frontend.edge-binary={program}"
    return graph(stack, "rust", step_s, *edge)


def alone(stack: ExitStack, program: Path, step_s: float) -> Server:
    arguments = str(program), f"{step_s:g}"
    pid, port = stack.enter_context(running_server("benchmarks.rust_alone", *arguments))
    return Server("alone", port, rust=(Meter(pid),))


def report(rounds: Sequence[Round]) -> None:
    print(f"streamed {TOKENS}-token chat requests; median (lowest to highest)\n")
    print(f"{'at a time':>9} {'server':8}{'CPU ms a request':>26}{'dispatcher':>12}", end="")
    print(f"{'tokens/s':>10}{'events':>8}{'CPU / alone':>28}")
    for concurrency in sorted({one.concurrency for one in rounds}):
        base = _of(rounds, "alone", concurrency)
        for name in ("python", "rust", "alone"):
            mine = _of(rounds, name, concurrency)
            ratios = [a.cpu_ms / b.cpu_ms for a, b in zip(mine, base, strict=True)]
            print(
                f"{concurrency:9} {name:8}{spread([one.cpu_ms for one in mine]):>26}"
                f"{statistics.median(one.dispatcher_ms for one in mine):12.2f}"
                f"{statistics.median(one.tokens_per_s for one in mine):10.0f}"
                f"{statistics.median(one.events for one in mine):8.1f}{spread(ratios):>28}",
                end="",
            )
            met = statistics.median(ratios) <= MAX_RATIO
            print(verdict(met, MAX_RATIO) * (name == "rust"))


def _of(rounds: Sequence[Round], name: str, concurrency: int) -> list[Round]:
    return [one for one in rounds if (one.server, one.concurrency) == (name, concurrency)]


if __name__ == "__main__":
    main()
